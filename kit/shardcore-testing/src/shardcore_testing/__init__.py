"""The conformance kit for packs, and what tests of sharded models share: a pool of worker processes.

Nothing here imports torch or pytest before it is used; the fixtures are in ``shardcore_testing.plugin``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore._lazy import on_first_use
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

if not TYPE_CHECKING:
    __getattr__ = on_first_use(
        __name__,
        {
            "shardcore_testing.cases": ("Case", "Supports"),
            "shardcore_testing.conformance": ("PolicyConformance",),
            "shardcore_testing.islands": ("no_float32_islands",),
            "shardcore_testing.tiny_models": (
                "encoder_decoder_batch",
                "hidden_loss",
                "randomized",
                "text_batch",
                "tiny",
                "weighted_mean",
            ),
        },
    )
