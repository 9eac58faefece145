"""What the core asks about transformers; see `shardcore.clients`."""

from __future__ import annotations

import sys
from typing import Any

from shardcore_transformers._context import CONTEXT
from shardcore_transformers.holders import CHANGES
from shardcore_transformers.loading import from_pretrained
from shardcore_transformers.pretrained import PretrainedPolicy
from shardcore_transformers.quantizing import unpacking

__all__ = ["CHANGES", "CONTEXT", "POLICY", "captured", "from_pretrained", "needs_of_optimizer", "unpacking"]

POLICY = PretrainedPolicy


def captured() -> list[list[Any]]:
    """Return the lists in which the forward that is running keeps what its hooks have seen inside of layers.

    Releases before 5.2 keep them where nobody else can see them.
    """
    capturing = sys.modules.get("transformers.utils.output_capturing")
    found = None if capturing is None else capturing._active_collector.get()
    return [values for values in (found or {}).values() if isinstance(values, list)]


def needs_of_optimizer(optimizer: Any) -> tuple[str | None, str]:
    """Return which of `shardcore_loop` has to step an optimizer of transformers, and the option that needs it."""
    return ("WholeTensors" if type(optimizer).__name__ == "Adafactor" else None), ""
