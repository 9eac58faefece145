"""The conformance kit for packs, and what tests of sharded models share: a pool of worker processes.

Nothing here imports torch or pytest before it is used; the fixtures are in ``shardcore_testing.plugin``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardcore_testing.pool import WorkerError, WorkerPool, WorkerTimeout

if TYPE_CHECKING:
    from shardcore_testing.cases import Case, Supports
    from shardcore_testing.conformance import PolicyConformance
    from shardcore_testing.islands import no_float32_islands
    from shardcore_testing.tiny_models import (
        encoder_decoder_batch,
        hidden_loss,
        randomized,
        text_batch,
        tiny,
        weighted_mean,
    )

__all__ = [
    "Case",
    "PolicyConformance",
    "Supports",
    "WorkerError",
    "WorkerPool",
    "WorkerTimeout",
    "encoder_decoder_batch",
    "hidden_loss",
    "no_float32_islands",
    "randomized",
    "text_batch",
    "tiny",
    "weighted_mean",
]

_HOME = {
    "Case": "shardcore_testing.cases",
    "PolicyConformance": "shardcore_testing.conformance",
    "Supports": "shardcore_testing.cases",
    "encoder_decoder_batch": "shardcore_testing.tiny_models",
    "hidden_loss": "shardcore_testing.tiny_models",
    "no_float32_islands": "shardcore_testing.islands",
    "randomized": "shardcore_testing.tiny_models",
    "text_batch": "shardcore_testing.tiny_models",
    "tiny": "shardcore_testing.tiny_models",
    "weighted_mean": "shardcore_testing.tiny_models",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a name that needs torch on first use (PEP 562)."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
