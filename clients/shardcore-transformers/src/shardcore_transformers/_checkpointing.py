"""Gradient checkpointing of single layers by transformers' own means."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import override

from shardcore.errors import NotSupportedError
from shardcore.plan.steps.base import ApplyContext, Commit, Step
from shardcore_transformers import _private


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeLayer(Step):
    """A layer of transformers recomputes its activations in the backward."""

    splits: ClassVar[bool] = False
    words: ClassVar[str] = "recomputed in the backward"

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        layer: Any = ctx.model.get_submodule(self.path)

        def commit() -> None:
            # What PreTrainedModel.gradient_checkpointing_enable sets on every layer; gradient_checkpointing_disable
            # undoes it. The layer itself leaves the cache out while it is checkpointed.
            layer.gradient_checkpointing = True
            layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)

        return commit


def recompute_layer(path: str, layer: nn.Module) -> Step:
    """Return the step for ``layer``.

    Raises:
        NotSupportedError: the layer cannot be checkpointed by itself, or not in this release of transformers.
    """
    if not isinstance(layer, GradientCheckpointingLayer):
        raise NotSupportedError(
            f"{path} is a {type(layer).__name__}, which is no GradientCheckpointingLayer of transformers and cannot be "
            "checkpointed by itself"
        )
    _private.require("recomputation")
    return RecomputeLayer(path=path)
