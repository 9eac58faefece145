"""Trainers of sentence-transformers on sharded models: what they do by ranks is done by replicas, or refused."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore.errors import NotSupportedError, ShardcoreError
from shardcore_trainer._replicas import Replicas
from shardcore_trainer.sentence_transformers.evaluating import in_one_order

#: What the card of a model computes by, and may be another on each rank.
_SHOWN = ("generate_widget_examples", "ir_model", "usage_examples")


def trains_embeddings(trainer: type[Any]) -> bool:
    """Tell whether a class is a trainer of sentence-transformers, or derives from one."""
    return any(cls.__module__.startswith("sentence_transformers.") for cls in trainer.__mro__)


class Embedding:
    """What such a trainer does in its own way if its model was sharded; it stands before the class of the trainer."""

    args: Any
    state: Any
    loss: Any
    model: Any
    optimizer: Any
    evaluator: Any
    eval_dataset: Any
    is_in_train: bool
    _replicas: Replicas | Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._replicas is not None and self._gathers():
            _refuse_ranks_that_are_no_replicas(self._replicas)

    @property
    def _losses(self) -> list[nn.Module]:
        losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        return [loss for loss in losses if isinstance(loss, nn.Module)]

    def _gathers(self) -> bool:
        """Tell whether a loss takes the embeddings of all ranks."""
        inside = [module for loss in self._losses for module in loss.modules()]
        return any(getattr(module, "gather_across_devices", False) for module in inside)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the optimizer, after what a loss trains of its own is the same on all ranks."""
        if self._replicas is not None:
            own = self._trained_by_losses()
            if own and self.args.save_strategy != "no" and not self.args.save_only_model:
                raise NotSupportedError(
                    f"{', '.join(list(own)[:3])} of the loss lie beside the sharded model, so that the state of their "
                    "optimizer is not in its checkpoints, and no training goes on from them. Pass save_only_model=True "
                    "or save_strategy='no' to the training arguments"
                )
            self._replicas.share(own.values())
        made = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)  # type: ignore[misc]  # of the trainer
        if made and self._replicas is not None:
            _in_groups_of_a_kind(self.optimizer)
        return optimizer

    def _trained_by_losses(self) -> dict[str, Tensor]:
        """Return the parameters that losses have beside those of the model, by name."""
        inside = set(map(id, self.model.parameters()))
        named = {name: parameter for loss in self._losses for name, parameter in loss.named_parameters()}
        return {
            name: parameter
            for name, parameter in named.items()
            if parameter.requires_grad and id(parameter) not in inside and not isinstance(parameter, DTensor)
        }

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; every rank calls it and one writes.

        Its card shows embeddings, which all ranks compute before one of them writes.
        """
        if self._replicas is None:
            super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]  # of Checkpoints
            return
        self._show_usage()
        with self._as_shown():
            super().save_model(output_dir, _internal_call=_internal_call)  # type: ignore[misc]  # of Checkpoints

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model's card, on the first rank alone, with the numbers of the last `save_model`."""
        with contextlib.nullcontext() if self._replicas is None else self._as_shown():
            super().create_model_card(*args, **kwargs)  # type: ignore[misc]  # of the trainer

    def _show_usage(self) -> None:
        """Compute on all ranks what the card of the model shows: the first rank alone could not."""
        card = self.model.model_card_data
        told = self._replicas.first(
            lambda: {name: getattr(card, name) for name in _SHOWN if hasattr(card, name)}, "all"
        )
        vars(card).update(told)
        try:
            card.run_usage_snippet()
        except ShardcoreError:
            raise
        except Exception as error:  # as the card itself does
            logging.getLogger("shardcore").warning("Error while computing usage snippet output: %s", error)

    @contextlib.contextmanager
    def _as_shown(self) -> Iterator[None]:
        """Let the card show what it has, and compute nothing."""
        card = self.model.model_card_data
        kept, card.generate_widget_examples = card.generate_widget_examples, False
        try:
            yield
        finally:
            card.generate_widget_examples = kept

    def _real_rows(self, rows: int | None) -> int | None:
        found: int | None = super()._real_rows(rows)  # type: ignore[misc]  # of Evaluating
        if found is not None and self._gathers():
            raise NotSupportedError(
                f"the rows of this evaluation do not fill the batches of the {self._replicas.count} replicas, and a "
                "loss with gather_across_devices=True takes as many from each of them. Evaluate so many that "
                f"per_device_eval_batch_size ({self.args.per_device_eval_batch_size}) x replicas divides their number, "
                "or leave eval_dataset out and pass evaluator="
            )
        return found

    def evaluation_loop(self, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any) -> Any:
        """Go through the data, then let every rank run the evaluator, on all sentences.

        The trainer's own would give each rank other sentences, whose forwards the ranks of a replica share.
        """
        kwargs["metric_key_prefix"] = metric_key_prefix
        if self._replicas is None or self.evaluator is None:
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]  # of the trainer
        evaluator, self.evaluator = self.evaluator, None
        try:
            output = super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]  # of the trainer
        finally:
            self.evaluator = evaluator
        if self.is_in_train and isinstance(self.eval_dataset, dict) and metric_key_prefix.startswith("eval_"):
            if metric_key_prefix != f"eval_{next(iter(self.eval_dataset))}":
                return output  # it runs once for all data sets
            metric_key_prefix = "eval"
        found = self._replicas.first(self._evaluated_alike(), "all")
        begin = f"{metric_key_prefix}_"
        output.metrics.update({name if name.startswith(begin) else begin + name: v for name, v in found.items()})
        return output

    def _evaluated_alike(self) -> Any:
        """Run the evaluator on this rank; the first one alone writes. Return what returns its metrics."""
        folder = Path(self.args.output_dir, "eval") if dist.get_rank() == 0 else None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        state, path = self.state, None if folder is None else str(folder)
        with in_one_order(self.model, self._replicas):
            found = self.evaluator(self.model, output_path=path, epoch=state.epoch, steps=state.global_step)
        return lambda: found if isinstance(found, dict) else {"evaluator": found}


def _in_groups_of_a_kind(optimizer: Any) -> None:
    """Give plain parameters groups of their own: torch takes no DTensors beside them in one call."""
    for group in list(optimizer.param_groups):
        plain = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
        if 0 < len(plain) < len(group["params"]):
            group["params"] = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
            optimizer.add_param_group({**group, "params": plain})


def _refuse_ranks_that_are_no_replicas(replicas: Replicas) -> None:
    """Refuse to gather over all ranks, unless each is a replica of its own, in their order.

    Raises:
        NotSupportedError: they are not.
    """
    at = replicas.context.mesh.mesh.flatten().tolist()
    if len(replicas.ranks) == 1 and at == list(range(replicas.count)):
        return
    raise NotSupportedError(
        "a loss with gather_across_devices=True takes the embeddings of all ranks, and the "
        f"{len(replicas.ranks)} ranks of each replica of this model embed the same sentences: each sentence would be "
        "a wrong answer to itself. Leave gather_across_devices out; for more rows in a batch, raise "
        "per_device_train_batch_size and use CachedMultipleNegativesRankingLoss (or another cached one), whose memory "
        "does not grow with them. With data parallelism alone (tp=1) it gathers as ever"
    )
