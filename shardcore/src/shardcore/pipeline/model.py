"""The model that a user has of a pipeline, its steps and what calls of it are; and how `shardcore.shard` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, NoReturn, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore._torch import CAN_PIPELINE
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.mixin import add_mixin
from shardcore.pipeline.engine import Pipeline, pipeline_of
from shardcore.pipeline.losses import Loss, Weight
from shardcore.pipeline.norms import clip_grads, grad_norm
from shardcore.plan import ShardPlan
from shardcore.plan.cut import Cut
from shardcore.plan.shard_plan import ModelPhase


class PipelinedModel(ParallelMixin):
    """A model of which each rank has some stages.

    `shardcore.shard` makes one of a model if ``pipeline_parallel_size`` is more than 1. Its parameters are those of
    this rank's stages. Every rank makes the same calls, with the same batch: on all ranks of one replica.
    """

    keeps_name: ClassVar[bool] = True

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
        return self._pipeline().step(
            batch, training=True, loss=loss, weight=weight, outputs=outputs, everywhere=everywhere
        )

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
        with torch.no_grad():
            return self._pipeline().step(
                batch, training=False, loss=loss, weight=weight, outputs=outputs, everywhere=everywhere
            )

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients, on all ranks, so that their norm is at most ``max_norm``; return the norm before.

        It is the norm of the whole model's gradients. torch's own would be that of this rank's stages.
        """
        norm = grad_norm(self)
        clip_grads(self, norm, max_norm)
        return norm

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the whole model on every rank; without gradients.

        Raises:
            NotSupportedError: gradients are wanted, or states that the blocks would keep for the next call.
        """
        if self._pipeline().running:
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
        assert pipeline is not None  # `Pipelining` has made it
        return pipeline

    def _refuse(self, what: str, instead: str) -> NoReturn:
        raise NotSupportedError(
            f"this {type(self).__name__} is divided among the ranks of a pipeline, which does not support {what}; "
            f"{instead}"
        )


class Pipelining(ModelPhase):
    """The division of one model among the ranks of a pipeline.

    Args:
        model: the model, unsharded yet.
        dtype: in which it will compute, where FSDP2 will cast.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._model, self._dtype = model, dtype

    def check(self, plan: ShardPlan) -> None:
        """Refuse what cannot be cut as the configuration says.

        Raises:
            ConfigError: the model has too few blocks, or settings contradict each other.
            NotSupportedError: the policy does not say where the model can be cut, or torch is too old.
        """
        if (plan.config.pipeline_parallel_size or 1) > 1:
            if not CAN_PIPELINE:
                raise NotSupportedError(
                    f"pipeline_parallel_size={plan.config.pipeline_parallel_size} needs torch 2.13 or newer, here is "
                    f"{torch.__version__}: a stage of older releases has to return a gradient for whatever it was "
                    "given, token ids too. Install a newer torch, or shard by tp= and dp= alone"
                )
            Cut.by(plan.config, self._model, plan.stages)

    def runs(self, context: ShardContext | None) -> bool:
        """Where there is a pipeline."""
        return context is not None and context.sizes.pp > 1

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Keep this rank's stages of the model, which is sharded along ``tp`` by now."""
        assert context is not None  # or else it does not run
        cut = Cut.by(plan.config, self._model, plan.stages)
        Pipeline(self._model, cut, context, plan.config, dtype=self._dtype)  # which the model knows from here on


class Stepping(ModelPhase):
    """The steps of a model in a pipeline, which it gets when everything else was done to it."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def runs(self, context: ShardContext | None) -> bool:
        """Where there is a pipeline."""
        return context is not None and context.sizes.pp > 1

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Give the model ``train_step`` and ``eval_step``."""
        add_mixin(self._model, PipelinedModel)
