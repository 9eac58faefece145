"""Gradients in storage of their own.

`AccumulateGrad` takes the first gradient of a parameter without a copy if nobody else refers to that tensor. Of a
DTensor it sees the wrapper, which is always new; the local tensor inside may be another gradient as well, as ``x + (a +
b)`` hands one tensor to both, or a view of one. Every later backward and every change in place would then reach both.
So a local gradient that somebody else made is copied before it is wrapped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["owned", "traced_owned"]

# To the compiler the copy is an operation of its own: inductor drops two clones of one tensor that are both outputs.
_LIBRARY = torch.library.Library("shardcore", "DEF")
_LIBRARY.define("owned(Tensor grad) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))


def owned(grad: Tensor) -> Tensor:
    """Return a copy of a gradient whose storage others may hold."""
    return grad.clone(memory_format=torch.contiguous_format)


_LIBRARY.impl("owned", owned, "CompositeExplicitAutograd")


class _Owned(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        out: Tensor = torch.ops.shardcore.owned(grads[0])
        return out


def traced_owned(local: Tensor) -> Tensor:
    """Return ``local``; its gradient is `owned`, in a compiled graph too."""
    out: Tensor = _Owned.apply(local)  # type: ignore[no-untyped-call]  # untyped in torch
    return out
