"""The bytes of parameters that each rank holds, read off a plan."""

from __future__ import annotations

import math

import torch

from shardcore.nn.layout import ExpertsLayout
from shardcore.plan import ParameterPlan, ShardPlan


def parameter_bytes(plan: ShardPlan, dtype: torch.dtype | None = None) -> list[int]:
    """Return the bytes of parameters on each tensor-parallel rank; data axes divide them further by ``dp_shard``.

    Parameters that a user's callable lays out count whole. With ``dtype``, floating ones count as cast to it.
    """
    ranks = plan.config.tensor_parallel_size or 1
    return [sum(bytes_on(p, ranks, rank, dtype) for p in plan.parameters) for rank in range(ranks)]


def local_shape(parameter: ParameterPlan, ranks: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a tensor-parallel rank's part of a parameter."""
    layout = parameter.layout
    if isinstance(layout, ExpertsLayout):
        layout = layout.inner  # the ranks of ``ep`` are among those of ``dp_shard``
    return parameter.shape if layout is None or ranks == 1 else layout.shape(parameter.shape, ranks, rank)


def bytes_on(parameter: ParameterPlan, ranks: int, rank: int, cast: torch.dtype | None = None) -> int:
    """Return the bytes of a tensor-parallel rank's part of a parameter, with ``cast`` as cast to it if it floats."""
    dtype: torch.dtype = getattr(torch, parameter.dtype.removeprefix("torch."))
    if cast is not None and dtype.is_floating_point:
        dtype = cast
    return math.prod(local_shape(parameter, ranks, rank)) * dtype.itemsize
