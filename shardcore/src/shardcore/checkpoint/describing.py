"""What a checkpoint says about its model, for whoever looks at it without having it."""

from __future__ import annotations

import json
import sys
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

import shardcore
from shardcore.nn.behaviour import native_class

__all__ = ["described"]


def described(model: nn.Module) -> dict[str, Any]:
    """Return the class of ``model`` as it was before it was sharded, its configurations, and the libraries, as JSON."""
    kinds = (kind for kind in type(model).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule))
    cls = native_class(next(kinds))
    library = cls.__module__.partition(".")[0]
    version = getattr(sys.modules.get(library), "__version__", None)
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "config": _as_data(getattr(model, "config", None)),
        "generation_config": _as_data(getattr(model, "generation_config", None)),
        "libraries": {"shardcore": shardcore.__version__, **({library: str(version)} if version else {})},
    }


def _as_data(config: Any) -> Any:
    """Return a configuration in transformers' own words; None of what has no such words."""
    return json.loads(config.to_json_string()) if callable(getattr(config, "to_json_string", None)) else None
