"""Training by the libraries that people train with: Trainer, Accelerate, TRL, sentence-transformers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore._lazy import on_first_use

if TYPE_CHECKING:
    from shardcore_trainer.meter import MeterCallback
    from shardcore_trainer.trainer import Seq2SeqTrainer, Trainer, sharded

__all__ = ["MeterCallback", "Seq2SeqTrainer", "Trainer", "sharded"]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(
        __name__,
        {
            "shardcore_trainer.meter": ("MeterCallback",),
            "shardcore_trainer.trainer": ("Seq2SeqTrainer", "Trainer", "sharded"),
        },
    )
