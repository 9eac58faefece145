"""The conformance kit for packs, and what tests of sharded models share: a pool of worker processes.

Nothing here imports torch or pytest before it is used; the fixtures are in ``shardcore.testing.plugin``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from shardcore.testing.pool import WorkerError, WorkerPool, WorkerTimeout

if TYPE_CHECKING:
    from shardcore.testing.cases import Case, Supports
    from shardcore.testing.conformance import PolicyConformance
    from shardcore.testing.islands import no_float32_islands
    from shardcore.testing.tiny_models import (
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
    "Case": "shardcore.testing.cases",
    "PolicyConformance": "shardcore.testing.conformance",
    "Supports": "shardcore.testing.cases",
    "encoder_decoder_batch": "shardcore.testing.tiny_models",
    "hidden_loss": "shardcore.testing.tiny_models",
    "no_float32_islands": "shardcore.testing.islands",
    "randomized": "shardcore.testing.tiny_models",
    "text_batch": "shardcore.testing.tiny_models",
    "tiny": "shardcore.testing.tiny_models",
    "weighted_mean": "shardcore.testing.tiny_models",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a name that needs torch on first use (PEP 562)."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
