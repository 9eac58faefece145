"""The Trainer's checkpoints of sharded models: its own files, and a folder of shardcore's for going on."""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from shardcore.checkpoint import load_checkpoint, save_checkpoint
from shardcore.checkpoint.snapshot import generators_of, set_generators
from shardcore.errors import CheckpointError, ShardcoreWarning
from shardcore_trainer._replicas import sharded_in
from shardcore_trainer._states import FOLDER, native_optimizer


class Checkpoints:
    """How a Trainer saves and resumes a sharded model; before the class of the Trainer.

    ``checkpoint-N`` has the standard checkpoint that ``save_pretrained`` writes, the Trainer's own small files, and
    (unless ``save_only_model``) the folder ``shardcore``: parameters, state of the optimizer and random numbers, each
    rank's part written by itself, for any mesh. The Trainer's state is the last that is written: without it a
    checkpoint is not complete.
    """

    model: Any
    args: Any
    optimizer: Any
    lr_scheduler: Any
    accelerator: Any
    state: Any
    _save: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; ``resume_from_checkpoint=True`` goes on from the newest checkpoint that is complete."""
        if resume_from_checkpoint is True and sharded_in(self.model) is not None:
            resume_from_checkpoint = self._newest_complete()
        return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def _newest_complete(self) -> str | bool:
        """Return the checkpoint to go on from, as the first rank sees them; True where there is none at all."""
        folder = Path(self.args.output_dir)
        complete, others = self.accelerator._replicas.first(lambda: _checkpoints_in(folder), "all")
        newer = [name for name in others if not complete or _number(name) > _number(complete[-1])]
        if newer and not complete:
            raise CheckpointError(
                f"no checkpoint in {folder} is complete: {', '.join(newer)} lack {TRAINER_STATE_NAME}, which is "
                "written last, so that the job ended while they were saved. Train without resume_from_checkpoint"
            )
        if newer:
            warnings.warn(
                f"{', '.join(newer)} in {folder} is not complete (the job ended while it was saved): going on from "
                f"{complete[-1]}",
                ShardcoreWarning,
                stacklevel=3,
            )
        return str(folder / complete[-1]) if complete else True

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model as an unsharded checkpoint; every rank calls it and one writes."""
        sharded = sharded_in(self.model)
        if sharded is not None and _internal_call and output_dir is not None and self.args.should_save:
            _begin_checkpoint(Path(output_dir))
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


def _checkpoints_in(folder: Path) -> tuple[list[str], list[str]]:
    """Return the checkpoints of a Trainer that are complete, and those that are not, each in their order."""
    found = [path for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if path.is_dir() and _number(path.name) >= 0]
    names = [path.name for path in sorted(found, key=lambda path: _number(path.name))]
    complete = [name for name in names if _is_complete(folder / name)]
    return complete, [name for name in names if name not in complete]


def _begin_checkpoint(folder: Path) -> None:
    """Let one of an earlier training, in whose place a checkpoint is saved now, not be complete until that is done."""
    if _number(folder.name) >= 0:
        (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)


def _is_complete(folder: Path) -> bool:
    try:
        json.loads((folder / TRAINER_STATE_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return True


def _number(name: str) -> int:
    found = re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", name)
    return -1 if found is None else int(found[1])
