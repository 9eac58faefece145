"""transformers' Trainer on sharded models: ``from shardcore_trainer import Trainer``, all else as ever."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
import transformers

from shardcore.errors import ConfigError, NotSupportedError
from shardcore.nn.mixin import once
from shardcore_trainer._checkpoints import Checkpoints
from shardcore_trainer._evaluating import Evaluating
from shardcore_trainer._losses import Losses
from shardcore_trainer._replicas import beside, sharded_in
from shardcore_trainer._rewards import Gathering
from shardcore_trainer._trl import Given, is_of_trl, made_ready
from shardcore_trainer.accelerate import adopt
from shardcore_trainer.meter import MeterCallback
from shardcore_trainer.sentence_transformers.training import Embedding, trains_embeddings
from shardcore_transformers import _private, prepared_by_shardcore

#: What callbacks ask the Trainer for, which all ranks do together or none does.
_WISHES = ("should_training_stop", "should_epoch_stop", "should_save", "should_evaluate", "should_log")


class _Sharded(Losses, Evaluating, Checkpoints):
    """What a Trainer does in its own way if its model was sharded; it stands before the class of the Trainer."""

    control: Any
    current_flos: float
    callback_handler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = Given(super().__init__, args, kwargs)
        complete = made_ready(type(self), given)
        super().__init__(*given.args, **given.kwargs)
        complete(self)

    def create_accelerator_and_postprocess(self) -> None:
        """Make the Accelerator one that knows the model."""
        self._refuse_a_second_sharding()  # of which Accelerate knows nothing on a CPU, or says that there is no device
        with prepared_by_shardcore():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]  # of the Trainer
        self._adopt(self.model)

    def _refuse_a_second_sharding(self) -> None:
        sharded, args = sharded_in(self.model), self.args
        wanted = [name for name in ("fsdp", "deepspeed", "parallelism_config") if getattr(args, name, None)]
        if sharded is not None and wanted:
            raise ConfigError(
                f"TrainingArguments have {wanted[0]}={getattr(args, wanted[0])!r}, and the {type(sharded).__name__} is "
                "sharded by shardcore: it cannot be sharded twice. Leave it out, and say tp= and dp= to shard()"
            )

    def call_model_init(self, trial: Any = None) -> Any:
        """Make the model of a trial, which the Accelerator has to know."""
        model = super().call_model_init(trial)  # type: ignore[misc]  # of the Trainer
        self._adopt(model)
        return model

    def _adopt(self, model: Any) -> None:
        if sharded_in(model) is None:
            return
        _private.require("the Trainer")
        adopt(self.accelerator, model)
        args, device = self.args, self._replicas.context.device
        if args.device.type != device.type or (device.index or 0) != (args.device.index or 0):
            raise ConfigError(
                f"the model lies on {device}, and TrainingArguments have chosen {args.device}. Start one process for "
                "each device with torchrun, whose LOCAL_RANK both go by, and make TrainingArguments after shard()"
            )
        if args.save_strategy != "no" and not args.save_only_model and (others := beside(model)):
            raise NotSupportedError(
                f"{', '.join(list(others)[:3])} lie beside the sharded {type(sharded_in(model)).__name__} in the "
                f"{type(model).__name__}, so that the state of their optimizer is not in its checkpoints, and no "
                "training goes on from them. Pass save_only_model=True or save_strategy='no' to TrainingArguments"
            )
        args._n_gpu = min(args._n_gpu, 1)  # this process has one device, whatever else it sees

    # Data

    def get_train_dataloader(self) -> Any:
        """Return the loader of this replica."""
        with self._counting_replicas(from_this_one=True):
            return super().get_train_dataloader()  # type: ignore[misc]  # of the Trainer

    def get_eval_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loader of this replica."""
        with self._counting_replicas(from_this_one=True):
            return super().get_eval_dataloader(*args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def get_test_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loader of this replica."""
        with self._counting_replicas(from_this_one=True):
            return super().get_test_dataloader(*args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def get_total_train_batch_size(self, args: Any) -> int:
        """Return the samples of one step, of all replicas."""
        with self._counting_replicas():
            return int(super().get_total_train_batch_size(args))  # type: ignore[misc]  # of the Trainer

    # Training

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train over the replicas."""
        self._refuse_watching()
        try:
            return super().train(*args, **kwargs)
        except BaseException:
            for meter in self._meters():
                meter.abandon()
            raise

    def _meters(self) -> list[MeterCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, MeterCallback)]

    def _refuse_watching(self) -> None:
        value = os.environ.get("WANDB_WATCH", "").lower()
        callbacks = [type(callback).__name__ for callback in self.callback_handler.callbacks]
        if value in ("all", "gradients") and self._replicas is not None and "WandbCallback" in callbacks:
            raise NotSupportedError(
                f"WANDB_WATCH={value} lets wandb look at gradients on rank 0 alone. Each is a DTensor of which every "
                "rank has a part, so that a look at it is a collective, which the other ranks do not begin. Unset "
                "WANDB_WATCH, and log gradients by a callback that runs on all ranks: 'Gradients in a log' in "
                "docs/trainer.md has one"
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log what a `MeterCallback` has measured beside a loss."""
        for meter in self._meters() if "loss" in logs else ():
            logs.update(meter.numbers)
        super().log(logs, *args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._agree_on_wishes()
        super()._maybe_log_save_evaluate(*args, **kwargs)  # type: ignore[misc]  # of the Trainer
        self._agree_on_wishes()  # what callbacks wished when they heard of it

    def _agree_on_wishes(self) -> None:
        """Do on all ranks what a callback of one of them asks for; else some would wait for the others."""
        if self._replicas is None:
            return
        wished = sum(getattr(self.control, name) << bit for bit, name in enumerate(_WISHES))
        wished = self._replicas.any_rank(wished)
        for bit, name in enumerate(_WISHES):
            setattr(self.control, name, bool(wished >> bit & 1))

    def store_flos(self) -> None:
        """Count the operations of a replica once, not for each of its ranks."""
        if self._replicas is not None:
            self.current_flos /= dist.get_world_size() / self._replicas.count
        super().store_flos()  # type: ignore[misc]  # of the Trainer


@once
def sharded(trainer: type[Any]) -> type[Any]:
    """Return ``trainer`` as a class that trains sharded models.

    `Trainer` and `Seq2SeqTrainer` are those of transformers. Any other class that derives from `transformers.Trainer`
    works too::

        SFTTrainer = shardcore_trainer.sharded(trl.SFTTrainer)

    With a model that is not sharded it is the same as ``trainer``.
    """
    if issubclass(trainer, _Sharded):
        return trainer
    namespace = {"__doc__": trainer.__doc__, "__module__": __name__, "__qualname__": trainer.__qualname__}
    ways = [(Embedding, trains_embeddings), (Gathering, is_of_trl)]
    own = [way for way, applies in ways if applies(trainer)]
    return type(trainer.__name__, (*own, _Sharded, trainer), namespace)


Trainer = sharded(transformers.Trainer)
Seq2SeqTrainer = sharded(transformers.Seq2SeqTrainer)
