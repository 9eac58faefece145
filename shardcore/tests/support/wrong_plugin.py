"""A plugin that imports torch, names a class that does not exist, and has no case for another one."""

from __future__ import annotations

import torch  # noqa: F401  # which discovery must not import

from shardcore.hooks import PolicySpec, hookimpl


@hookimpl
def shardcore_policies() -> list[PolicySpec]:
    names = ("Net", "Decoder", "Gone")
    return [PolicySpec(target=f"kit_net.{name}", policy="wrong_plans:OrderOfASet") for name in names]


@hookimpl
def shardcore_conformance_cases() -> list[str]:
    return ["wrong_plans:digest_cases"]
