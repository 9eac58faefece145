"""The model that a user has of a pipeline: its steps, and what calls of it are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore.errors import NotSupportedError
from shardcore.nn.base import SwappedModule
from shardcore.nn.behaviour import add_behaviour
from shardcore.pipeline.marks import pipeline_of, set_pipeline
from shardcore.pipeline.pipe import Pipeline
from shardcore.pipeline.steps import Loss, Weight

__all__ = ["PipelinedModel"]


class PipelinedModel(SwappedModule):
    """A model of which each rank has some stages.

    `shardcore.shard` makes one of a model if ``pipeline_parallel_size`` is more than 1. Its parameters are those of
    this rank's stages. Every rank makes the same calls, with the same batch: on all ranks of one replica.
    """

    keeps_name: ClassVar[bool] = True

    @classmethod
    def of(cls, model: nn.Module, pipeline: Pipeline) -> None:
        """Make ``model``, the one of ``pipeline``, one of this class, in place."""
        add_behaviour(model, cls)
        set_pipeline(model, pipeline)

    def train_step(
        self,
        batch: Mapping[str, Any],
        *,
        loss: Loss | None = None,
        weight: Weight | None = None,
        outputs: list[Any] | None = None,
        everywhere: bool = False,
    ) -> Tensor:
        """Run forward and backward of a batch, in micro-batches, and return its loss: () on every rank.

        Gradients are added to those that the parameters have. If it fails on a rank, it raises on all of them, and
        there are no gradients.

        Args:
            batch: the arguments of a call, by name.
            loss: a function of the model's output and a micro-batch, which returns the loss: a mean over as many items
                as ``weight`` says. By default what the output calls ``loss``, or an output that is one number.
            weight: a function of a micro-batch, which returns over how many items its loss is a mean. By default
                labels that count, or rows.
            outputs: is extended by the outputs of all micro-batches, detached, on the ranks of the last stage.
            everywhere: on all ranks; what only earlier stages know of an output is None.

        Raises:
            AgreementError: another rank failed, or the batches differ.
            ConfigError: the batch cannot be divided, or there is no loss.
            NotSupportedError: a stage would need what only another one computes.
        """
        return self._pipeline().train_step(batch, loss=loss, weight=weight, outputs=outputs, everywhere=everywhere)

    def eval_step(
        self,
        batch: Mapping[str, Any],
        *,
        loss: Loss | None = None,
        weight: Weight | None = None,
        outputs: list[Any] | None = None,
        everywhere: bool = False,
    ) -> Tensor:
        """Return the loss of a batch, () on every rank, without a backward; the arguments are those of `train_step`."""
        return self._pipeline().eval_step(batch, loss=loss, weight=weight, outputs=outputs, everywhere=everywhere)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients, on all ranks, so that their norm is at most ``max_norm``; return the norm before.

        It is the norm of the whole model's gradients. torch's own would be that of this rank's stages.
        """
        return self._pipeline().clip_grad_norm_(max_norm)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the whole model on every rank; without gradients.

        Raises:
            NotSupportedError: gradients are wanted, or states that the blocks would keep for the next call.
        """
        if self._pipeline().is_running:
            return super().__call__(*args, **kwargs)
        if torch.is_grad_enabled():
            self._refuse("a call that records gradients", "call model.train_step(batch), or use torch.no_grad()")
        if args:
            self._refuse("positional arguments", "pass them by name")
        given = [kwargs.get(name) for name in ("cache", "past_key_values")]
        if any(cache is not None for cache in given) or kwargs.get("use_cache"):
            self._refuse("a cache, of which each rank would have some layers", "pass use_cache=False")
        return self._pipeline().forward(kwargs)

    @override
    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse a cast: what goes from stage to stage has the dtype that the model had in `shard`."""
        for dtype in {parameter.dtype for parameter in self.parameters()}:
            if (other := fn(torch.empty(0, dtype=dtype)).dtype) != dtype:
                self._refuse(
                    f"a cast from {dtype} to {other}", "cast it before shard(), or use wrap={'mp_policy': ...}"
                )
        return super()._apply(fn, recurse)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Refuse: a copy would run its stages in the schedules of this one."""
        self._refuse("copy.deepcopy", "copy the model before shard(), and shard both")

    @override
    def __copy__(self) -> Self:
        """Refuse: a copy would not be called as this one is."""
        self._refuse("copy.copy", "use the model itself")

    def _pipeline(self) -> Pipeline:
        pipeline = pipeline_of(self)
        assert pipeline is not None  # `of` has set it
        return pipeline

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise NotSupportedError(
            f"this {type(self).__name__} is divided among the ranks of a pipeline, which does not support {what}; "
            f"{instead}"
        )
