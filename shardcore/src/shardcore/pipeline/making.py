"""What `shardcore.shard` does to a model for a pipeline: what has to hold before, and the change."""

from __future__ import annotations

import torch
from torch import nn

from shardcore._torch import CAN_PIPELINE
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext
from shardcore.pipeline.model import PipelinedModel
from shardcore.pipeline.pipe import Pipeline
from shardcore.plan import ShardPlan
from shardcore.plan.cut import Cut
from shardcore.plan.phases import ModelPhase

__all__ = ["Pipelining", "Stepping"]


class Pipelining(ModelPhase):
    """The division of one model among the ranks of a pipeline.

    Args:
        model: the model, unsharded yet.
        dtype: in which it will compute, where FSDP2 will cast.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        self._model, self._dtype = model, dtype
        self.pipeline: Pipeline | None = None

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
        self.pipeline = Pipeline(self._model, cut, context, plan.config, dtype=self._dtype)


class Stepping(ModelPhase):
    """The steps of a model in a pipeline, which it gets when everything else was done to it."""

    def __init__(self, model: nn.Module, pipelining: Pipelining) -> None:
        self._model, self._pipelining = model, pipelining

    def runs(self, context: ShardContext | None) -> bool:
        """Where there is a pipeline."""
        return self._pipelining.runs(context)

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Give the model ``train_step`` and ``eval_step``."""
        assert self._pipelining.pipeline is not None  # it was divided
        PipelinedModel.of(self._model, self._pipelining.pipeline)
