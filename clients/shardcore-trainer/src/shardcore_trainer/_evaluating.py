"""The Trainer's evaluation of sharded models: each row counts once, in the loss too."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.trainer_pt_utils import find_batch_size

from shardcore.errors import ConfigError, NotSupportedError
from shardcore_trainer._replicas import Replicas, rowwise, sharded_in, whole
from shardcore_trainer._trl import refusal_of_rows, takes_filled_batches_only


class Evaluating:
    """How a Trainer evaluates a sharded model; before the class of the Trainer.

    Replicas call the model equally often, so that the last batches are filled up with rows that were there before. The
    Trainer leaves these out of predictions and labels; here they are left out of the loss as well.
    """

    model: Any
    args: Any
    accelerator: Any
    _counted = True  # whether the rows of this replica's batch are none but rows that were there before
    _scaled = False  # whether the loss of a batch was divided by the labels of all replicas

    @property
    def _replicas(self) -> Replicas | Any:
        return getattr(self.accelerator, "_replicas", None)

    @contextlib.contextmanager
    def _counting_replicas(self, *, from_this_one: bool = False) -> Iterator[None]:
        """Let ``args.world_size`` be the number of replicas in here; on wish ``args.process_index`` this one's."""
        if self._replicas is None:
            if (found := sharded_in(self.model)) is not None:
                raise ConfigError(
                    f"the {type(found).__name__} was sharded after this {type(self).__name__} was made, which has not "
                    "divided the data among replicas then. Shard the model first, and give the sharded one to the "
                    f"{type(self).__name__}"
                )
            yield
            return
        kept = self.args.distributed_state
        index = self._replicas.index if from_this_one else kept.process_index
        self.args.distributed_state = _State(kept, self._replicas.count, index)
        try:
            yield
        finally:
            self.args.distributed_state = kept

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate over the replicas."""
        with self._counting_replicas():
            return super().evaluate(*args, **self._generating(kwargs))  # type: ignore[misc]  # of the Trainer

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Predict over the replicas; every rank returns all rows once."""
        with self._counting_replicas():
            return super().predict(*args, **self._generating(kwargs))  # type: ignore[misc]  # of the Trainer

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Go through the data."""
        if self._replicas is not None:
            # Seq2SeqTrainer keeps the rows with which last batches are filled up.
            gather = self.accelerator.gather_for_metrics
            self.gather_function = functools.partial(gather, use_gather_object=self.args.eval_use_gather_object)
        return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]  # of the Trainer

    def _generating(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Let replicas that generate run as many forwards as the longest: FSDP2 gathers weights in each."""
        several = self._replicas is not None and self._replicas.count > 1
        if several and isinstance(self, transformers.Seq2SeqTrainer) and self.args.predict_with_generate:
            kwargs.setdefault("synced_gpus", True)
        return kwargs

    def prediction_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """Return loss, full logits and labels of a batch."""
        rows = find_batch_size(inputs)
        if (real := self._real_rows(rows)) is None:
            found = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]  # of the Trainer
            return found if self._replicas is None else tuple(map(whole, found))
        kept = max(real, 1)  # every replica has to call the model
        self._counted, self._scaled = real > 0, False
        short = rowwise(inputs, rows, lambda tensor: tensor[:kept])
        loss, logits, labels = super().prediction_step(model, short, *args, **kwargs)  # type: ignore[misc]  # of the Trainer
        self._counted = True

        def filled(tensor: Tensor) -> Tensor:
            return torch.cat([tensor, tensor[-1:].expand(rows - kept, *tensor.shape[1:])])

        outputs = [None if value is None else rowwise(whole(value), kept, filled) for value in (logits, labels)]
        return None if loss is None else self._over_replicas(loss, real), outputs[0], outputs[1]

    def _real_rows(self, rows: int | None) -> int | None:
        """Return how many rows of this replica's batch are there for the first time; None if those of all are."""
        if self._replicas is None or self._replicas.count == 1 or rows is None:
            return None
        state = self.accelerator.gradient_state
        if not state.end_of_dataloader or state.remainder <= 0:
            return None
        if takes_filled_batches_only(self):
            raise NotSupportedError(refusal_of_rows(self, "the samples of this evaluation do"))
        return int(min(max(state.remainder - self._replicas.index * rows, 0), rows))

    def _over_replicas(self, loss: Tensor, real: int) -> Tensor:
        """Return the loss of all rows that are there for the first time, the same on every replica."""
        share = torch.tensor(float(real > 0) if self._scaled else float(real), dtype=loss.dtype, device=loss.device)
        both = torch.stack([loss * share if real else torch.zeros_like(loss), share])
        total, shares = self._replicas.reduce(both, "sum", 1.0)
        result: Tensor = total / (self._replicas.count if self._scaled else shares)
        return result

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any) -> Any:
        if not self._counted:
            batch_samples = [
                {name: torch.full_like(value, -100) if name == "labels" else value for name, value in batch.items()}
                for batch in batch_samples
            ]
        items = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]  # of the Trainer
        averages = self._replicas is not None and self.args.average_tokens_across_devices
        self._scaled = averages and items is not None
        return items


class _State:
    """Accelerate's state of the process, with other numbers of processes."""

    def __init__(self, state: Any, count: int, index: int) -> None:
        self._state, self.num_processes, self.process_index = state, count, index

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)
