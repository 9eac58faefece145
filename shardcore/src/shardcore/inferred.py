"""The policy of a class that no pack serves: a kit infers it, if it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Literal, TypeAlias, cast

from torch import nn
from torch.distributed import ProcessGroup

from shardcore.errors import ConfigError
from shardcore.plugins.unserved import folders_of, installing
from shardcore.policy import Policy

__all__ = ["Inference", "inference"]

#: How far an inferred policy is trusted: after a proof on a small copy of the class, or as it was drafted.
Inference: TypeAlias = Literal["proved", "drafted"]

_KIT = "shardcore_scaffold"


def inference() -> Callable[[nn.Module, Inference, ProcessGroup | None], type[Policy]]:
    """Return what infers a policy for the class of a model: the first rank of a group does it for all.

    Raises:
        ConfigError: it is not installed.
    """
    if importlib.util.find_spec(_KIT) is None:
        name = _KIT.replace("_", "-")
        raise ConfigError(f"policy='infer' is of {name}, which is not installed{installing(*folders_of('kit'))}")
    found = importlib.import_module(f"{_KIT}.inferred").inferred
    return cast("Callable[[nn.Module, Inference, ProcessGroup | None], type[Policy]]", found)
