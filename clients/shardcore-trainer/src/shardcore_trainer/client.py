"""What the core asks about Accelerate; see `shardcore.clients`. Imports nothing: it is asked for words alone."""

__all__ = ["INSTEAD_OF_WRAPPING"]

INSTEAD_OF_WRAPPING = (
    "Where a trainer does it, change one line: from shardcore_trainer import Trainer; for any other class of trainers "
    "sharded(SentenceTransformerTrainer), sharded(CrossEncoderTrainer) and the like from the same module; for "
    "Accelerate: from shardcore_trainer.accelerate import Accelerator."
)
