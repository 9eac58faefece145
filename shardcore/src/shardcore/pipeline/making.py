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

__all__ = ["Pipelining"]


class Pipelining:
    """The division of one model among the ranks of a pipeline.

    Args:
        model: the model, unsharded yet.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._pipeline: Pipeline | None = None

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

    def divide(self, context: ShardContext, plan: ShardPlan, dtype: torch.dtype | None) -> None:
        """Keep this rank's stages of the model, which is sharded along ``tp`` by now.

        Args:
            context: that of the model.
            plan: that of the whole model.
            dtype: in which it will compute, where FSDP2 will cast.
        """
        cut = Cut.by(plan.config, self._model, plan.stages)
        self._pipeline = Pipeline(self._model, cut, context, plan.config, dtype=dtype)

    def finish(self) -> None:
        """Give the model its steps, when everything else was done to it."""
        if self._pipeline is not None:
            PipelinedModel.of(self._model, self._pipeline)
