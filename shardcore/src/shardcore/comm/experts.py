"""What mixtures of experts need besides the pairs of `shardcore.comm.collectives`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

__all__ = ["share_gradient"]


class _ShareGradient(Function):
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
