"""Training by the libraries that people train with: Trainer, Accelerate, TRL, sentence-transformers."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardcore_trainer.trainer import Seq2SeqTrainer, Trainer, sharded

__all__ = ["Seq2SeqTrainer", "Trainer", "sharded"]

_HOME = {
    "Seq2SeqTrainer": "shardcore_trainer.trainer",
    "Trainer": "shardcore_trainer.trainer",
    "sharded": "shardcore_trainer.trainer",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a public name on first use (PEP 562)."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
