"""What the core asks about transformers; see `shardcore.clients`."""

from __future__ import annotations

from typing import Any

from shardcore_transformers._context import CONTEXT
from shardcore_transformers.holders import CHANGES
from shardcore_transformers.loading import from_pretrained
from shardcore_transformers.pretrained import PretrainedPolicy
from shardcore_transformers.quantizing import unpacking

__all__ = ["CHANGES", "CONTEXT", "POLICY", "from_pretrained", "needs_of_optimizer", "unpacking"]

POLICY = PretrainedPolicy


def needs_of_optimizer(optimizer: Any) -> tuple[str | None, str]:
    """Return which of `shardcore.optimizers` has to step an optimizer of transformers, and the option that needs it."""
    return ("WholeTensors" if type(optimizer).__name__ == "Adafactor" else None), ""
