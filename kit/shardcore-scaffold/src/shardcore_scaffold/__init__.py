"""New packs: what a model class computes, the policy that follows from it, and the files of a distribution."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardcore_scaffold.draft import Draft
    from shardcore_scaffold.files import Example, write_pack

__all__ = ["Draft", "Example", "write_pack"]

_HOME = {
    "Draft": "shardcore_scaffold.draft",
    "Example": "shardcore_scaffold.files",
    "write_pack": "shardcore_scaffold.files",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a public name on first use (PEP 562): commands say what they do without torch."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
