"""Trainers of sentence-transformers on sharded models: what they do by ranks is done by replicas, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from shardcore.errors import NotSupportedError
from shardcore.integrations._replicas import Replicas

__all__ = ["Embedding", "trains_embeddings"]


def trains_embeddings(trainer: type[Any]) -> bool:
    """Tell whether a class is a trainer of sentence-transformers, or derives from one."""
    return any(cls.__module__.startswith("sentence_transformers.") for cls in trainer.__mro__)


class Embedding:
    """What such a trainer does in its own way if its model was sharded; it stands before the class of the trainer."""

    args: Any
    state: Any
    loss: Any
    model: Any
    evaluator: Any
    eval_dataset: Any
    is_in_train: bool
    _replicas: Replicas | Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self._replicas is not None and self._gathers():
            _refuse_ranks_that_are_no_replicas(self._replicas)

    def _gathers(self) -> bool:
        """Tell whether a loss takes the embeddings of all ranks."""
        losses = self.loss.values() if isinstance(self.loss, dict) else [self.loss]
        inside = [module for loss in losses if isinstance(loss, nn.Module) for module in loss.modules()]
        return any(getattr(module, "gather_across_devices", False) for module in inside)

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
        found = self.evaluator(self.model, output_path=path, epoch=state.epoch, steps=state.global_step)
        return lambda: found if isinstance(found, dict) else {"evaluator": found}


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
