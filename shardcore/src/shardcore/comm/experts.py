"""What mixtures of experts need besides the pairs of `shardcore.comm.collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.dtensor_params import local_tensor, spec_of, with_spec
from shardcore.comm.flow import LEAVES, Flow

__all__ = ["share_gradient", "touch"]


class _ShareGradient(Function):
    flow = LEAVES

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


def share_gradient(x: Tensor, ranks: int) -> Tensor:
    """Leave a region with a tensor (...) that every rank has in full: nothing is sent.

    Identity forward. The gradient that comes back is the same on all ranks, while gradients inside are summands: each
    rank contributes its part of ``ranks`` equal ones, in the backward.
    """
    out: Tensor = _ShareGradient.apply(x, ranks)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


class _Touch(Function):
    flow = Flow(parameters=1, zeros=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[1:]
        zeros = (torch.zeros_like(local_tensor(p)) if n else None for p, n in zip(ctx.parameters, needs, strict=True))
        specs = map(spec_of, ctx.parameters)
        return (grads[0], *(None if z is None else with_spec(z, s) for z, s in zip(zeros, specs, strict=True)))


def touch(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return ``x``; in its backward every one of ``parameters`` gets a gradient, which adds zero."""
    out: Tensor = _Touch.apply(x, *parameters)  # type: ignore[no-untyped-call]  # untyped in torch
    return out
