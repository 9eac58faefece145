"""What a checkpoint says about its model, for whoever looks at it without having it."""

from __future__ import annotations

import json
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardcore.agree.fingerprint import libraries
from shardcore.mesh import context_of
from shardcore.nn.behaviour import native_class

__all__ = ["described"]


def described(model: nn.Module) -> dict[str, Any]:
    """Return the class of ``model`` as it was before it was sharded, its configurations, and versions, as JSON.

    The versions are those of the libraries, and of the pack whose policy the model was sharded by.
    """
    kinds = (kind for kind in type(model).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule))
    cls = native_class(next(kinds))
    context = context_of(model)
    pack, _, version = ("" if context is None else context.origin).partition(" ")
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "config": _as_data(getattr(model, "config", None)),
        "generation_config": _as_data(getattr(model, "generation_config", None)),
        "libraries": {**libraries(model), **({pack: version} if pack else {})},
    }


def _as_data(config: Any) -> Any:
    """Return a configuration in its own words; None of what has no such words."""
    return json.loads(config.to_json_string()) if callable(getattr(config, "to_json_string", None)) else None
