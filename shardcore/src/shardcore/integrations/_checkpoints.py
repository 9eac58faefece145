"""The Trainer's checkpoints of sharded models: its own files, and a folder of shardcore's for going on."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from shardcore.checkpoint import load_checkpoint, save_checkpoint
from shardcore.checkpoint.generators import generators_of, set_generators
from shardcore.errors import CheckpointError
from shardcore.integrations._replicas import sharded_in
from shardcore.integrations._states import FOLDER, native_optimizer

__all__ = ["Checkpoints"]


class Checkpoints:
    """How a Trainer saves and resumes a sharded model; before the class of the Trainer.

    ``checkpoint-N`` has the standard checkpoint that ``save_pretrained`` writes, the Trainer's own small files, and
    (unless ``save_only_model``) the folder ``shardcore``: parameters, state of the optimizer and random numbers, each
    rank's part written by itself, for any mesh.
    """

    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    state: Any
    _save: Any

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as an unsharded checkpoint; every rank calls it and one writes."""
        sharded = sharded_in(self.model)
        saving: Any = getattr(self.model, "save_pretrained", None)
        if sharded is not None and saving is None:
            whole = self.accelerator.get_state_dict(self.model)
            if self.args.should_save:
                self._save(output_dir, state_dict=whole)
        elif sharded is None or self.args.should_save:
            super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]  # of the Trainer
        else:
            # What holds a sharded model, as sentence-transformers do, calls it where it writes.
            here: Any = self.model if "is_main_process" in inspect.signature(saving).parameters else sharded
            here.save_pretrained(output_dir or self.args.output_dir, is_main_process=False)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if (model := sharded_in(self.model)) is None:
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]  # of the Trainer
            return
        save_checkpoint(Path(output_dir) / FOLDER, model, native_optimizer(self.optimizer), keep_last=1)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _save_rng_state(self, output_dir: str) -> None:
        if sharded_in(self.model) is None:  # else they are in the checkpoint
            super()._save_rng_state(output_dir)  # type: ignore[misc]  # of the Trainer

    def _inner_training_loop(self, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train with the batch size of the arguments: transformers 4 takes that of other replicas from a checkpoint."""
        if sharded_in(self.model) is not None and not self.args.auto_find_batch_size:
            batch_size = self.args.train_batch_size
        return super()._inner_training_loop(batch_size, *args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *args: Any, **kwargs: Any) -> None:
        """Load the weights, unless they come with the optimizer's state afterwards."""
        if not self._has_own(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        model = sharded_in(self.model)
        if model is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]  # of the Trainer
            return
        if not self._has_own(checkpoint):
            if (Path(checkpoint) / OPTIMIZER_NAME).exists():
                raise CheckpointError(
                    f"{checkpoint} has the state of an optimizer in {OPTIMIZER_NAME}, as a Trainer of an unsharded "
                    "model saves it, which knows parameters by their numbers alone and cannot be given to ranks. Load "
                    "the model from that folder with from_pretrained, shard it and train without "
                    "resume_from_checkpoint; or go on unsharded"
                )
            return  # save_only_model
        load_checkpoint(Path(checkpoint) / FOLDER, model, native_optimizer(self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))
        self._generators = generators_of(model)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Set the random numbers as they were saved: since then batches were skipped."""
        model = sharded_in(self.model)
        if model is None or checkpoint is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]  # of the Trainer
        elif (generators := self.__dict__.pop("_generators", None)) is not None:
            set_generators(model, generators)

    def _load_best_model(self) -> None:
        model = sharded_in(self.model)
        best = self.state.best_model_checkpoint
        if model is None or not self._has_own(best):
            super()._load_best_model()  # type: ignore[misc]  # of the Trainer
            return
        generators = generators_of(model)
        load_checkpoint(Path(best) / FOLDER, model)
        set_generators(model, generators)

    def _has_own(self, checkpoint: str | os.PathLike[str]) -> bool:
        """Tell whether ``checkpoint`` has shardcore's folder, as the first rank sees it."""
        if sharded_in(self.model) is None:
            return False
        own = Path(checkpoint) / FOLDER
        return bool(self.accelerator._replicas.first(own.is_dir, "all")) if dist.is_initialized() else False
