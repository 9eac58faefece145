"""The bytes of parameters that each rank holds, read off a plan."""

from __future__ import annotations

import math

import torch

from shardcore.nn.layout import ExpertsLayout
from shardcore.plan import ParameterPlan, ShardPlan

__all__ = ["parameter_bytes"]


def parameter_bytes(plan: ShardPlan, dtype: torch.dtype | None = None) -> list[int]:
    """Return the bytes of parameters on each tensor-parallel rank; data axes divide them further by ``dp_shard``.

    Parameters that a user's callable lays out count whole. With ``dtype``, floating ones count as cast to it.
    """
    ranks = plan.config.tensor_parallel_size or 1
    return [sum(_bytes(p, ranks, rank, dtype) for p in plan.parameters) for rank in range(ranks)]


def _bytes(parameter: ParameterPlan, ranks: int, rank: int, cast: torch.dtype | None) -> int:
    shape, layout = parameter.shape, parameter.layout
    if isinstance(layout, ExpertsLayout):
        layout = layout.inner  # the ranks of ``ep`` are among those of ``dp_shard``
    if layout is not None and ranks > 1:
        shape = layout.shape(shape, ranks, rank)
    dtype: torch.dtype = getattr(torch, parameter.dtype.removeprefix("torch."))
    if cast is not None and dtype.is_floating_point:
        dtype = cast
    return math.prod(shape) * dtype.itemsize
