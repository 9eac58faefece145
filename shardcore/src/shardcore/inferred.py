"""The policy of a class that no pack serves: a kit infers it, if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Literal, TypeAlias, cast

from torch import nn
from torch.distributed import ProcessGroup

from shardcore.errors import ConfigError
from shardcore.plugins.unserved import installing
from shardcore.policy import Policy

#: How far an inferred policy is trusted: see `shardcore.shard`.
Inference: TypeAlias = Literal["proved", "proved_in_part", "drafted"]


def inference() -> Callable[[nn.Module, Inference, ProcessGroup | None], type[Policy]]:
    """Return what infers a policy for the class of a model: the first rank of a group does it for all."""
    if importlib.util.find_spec("shardcore_scaffold") is None:
        raise ConfigError(f"policy='infer' is of shardcore-scaffold, which is not installed{installing('kit')}")
    found = importlib.import_module("shardcore_scaffold.inferred").inferred
    return cast("Callable[[nn.Module, Inference, ProcessGroup | None], type[Policy]]", found)
