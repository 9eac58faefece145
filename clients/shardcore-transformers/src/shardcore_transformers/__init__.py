"""Models of transformers: loaded, saved, exported and generated from as they are, sharded.

`PretrainedPolicy` is what the policies of packs derive from. Nothing here is needed for models of other libraries.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardcore_transformers.pretrained import PretrainedPolicy, prepared_by_shardcore

__all__ = ["PretrainedPolicy", "prepared_by_shardcore"]

_HOME = {
    "PretrainedPolicy": "shardcore_transformers.pretrained",
    "prepared_by_shardcore": "shardcore_transformers.pretrained",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a public name on first use (PEP 562)."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
