"""What mixtures of experts need besides the pairs of `shardcore.comm.collectives`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.dtensor_params import local_tensor, spec_of, with_spec
from shardcore.comm.gradients import LEAVES, Flow


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
    return _ShareGradient.apply(x, ranks)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


class _Touch(Function):
    flow = Flow(parameters=1, zeros=True)

    @staticmethod
    def forward(ctx: Any, x: Tensor, wanted: tuple[Tensor, list[int]] | None, *parameters: Tensor) -> Tensor:
        # Which experts are wanted, and whose each parameter is; None: all. In a tuple: no input of the node.
        ctx.wanted, ctx.parameters = wanted, parameters
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[2:])
        if ctx.wanted is not None:
            called, experts = ctx.wanted[0].tolist(), ctx.wanted[1]
            needs = [n and called[i] for n, i in zip(needs, experts, strict=True)]
        zeros = [
            with_spec(torch.zeros_like(local_tensor(p)), spec_of(p)) if need else None
            for p, need in zip(ctx.parameters, needs, strict=True)
        ]
        return grads[0], None, *zeros


def touch(x: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return ``x``; in its backward every one of ``parameters`` gets a gradient, which adds zero."""
    return _Touch.apply(x, None, *parameters)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def touch_elsewhere(x: Tensor, called: Tensor, lacking: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return ``x``; in its backward, parameters that only other ranks have used get a gradient, which adds zero.

    Args:
        x: any tensor that needs a gradient.
        called: (E,), integers: which experts any rank has called. It is looked at in the backward.
        lacking: for each expert its parameters if this rank has not called it, else none.
    """
    experts = [i for i, parameters in enumerate(lacking) for _ in parameters]
    flat = [parameter for parameters in lacking for parameter in parameters]
    return _Touch.apply(x, (called, experts), *flat)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch
