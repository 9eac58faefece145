"""What an autograd function does to a gradient, in words, and gradients in storage of their own.

Ordinary operations hand on what they get. Only functions that send something, or that read parameters, make of a
gradient that all ranks have one that is each rank's own, or the other way round. Each of them says so in an attribute
``flow``, which is looked at once for each way of calling a model (`shardcore.nn.region.flow`) and never while it runs.

`AccumulateGrad` takes the first gradient of a parameter without a copy if nobody else refers to that tensor. Of a
DTensor it sees the wrapper, which is always new; the local tensor inside may be another gradient as well, as ``x + (a +
b)`` hands one tensor to both, or a view of one. Every later backward and every change in place would then reach both.
So a local gradient that somebody else made is copied before it is wrapped.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function


class GradPlacement(enum.Enum):
    """Where a gradient is, over the ranks of ``tp``; after the types of torchtitan's ``spmd_types``.

    Attributes:
        REPLICATE: all of it, and the same on every rank.
        VARYING: another on each rank: its summand (`Partial`), or its part (`Shard`: its heads, its tokens).
        UNKNOWN: it came through a function that says nothing.
    """

    REPLICATE = "replicate"
    VARYING = "varying"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Flow:
    """What one autograd function does in its backward.

    Attributes:
        takes: whose the gradient of its output has to be; None for any.
        gives: whose the gradient of its input is then; None for that of the output.
        one_to_one: output i is made of the i-th tensor among the inputs alone.
        parameters: the first tensor among the inputs whose gradient is what that of the output is, whatever ``gives``
            says: parameters beside the input. None if there is none.
        group: the attribute of the node that several nodes have in common. Nodes with parameters give these what the
            others of the group have got; such a node computes no gradient by itself.
        zeros: the gradient of the parameters is zero.
        of_tokens: what it does where the attribute ``length`` of the node is set: tokens are split outside.
        edge: of a region, inside of which activations are split over the ranks, if it is one.
    """

    takes: GradPlacement | None = None
    gives: GradPlacement | None = None
    one_to_one: bool = False
    parameters: int | None = None
    group: str = ""
    zeros: bool = False
    of_tokens: Flow | None = None
    edge: Literal["enters", "leaves"] | None = None


#: Nothing is sent, and nothing changes.
PASSES = Flow()
#: Into a region: each rank has a summand, which are summed. Or each has its part, which are put together.
ENTERS = Flow(GradPlacement.VARYING, GradPlacement.REPLICATE, edge="enters")
#: Out of a region: what follows is the same on all ranks, and each takes the gradient of what it brought.
LEAVES = Flow(GradPlacement.REPLICATE, GradPlacement.VARYING, edge="leaves")
#: Between two ways to be split: rows of parameters, or heads inside of a region and tokens outside.
SPLIT = Flow(GradPlacement.VARYING, GradPlacement.VARYING)
ENTERS_SPLIT = Flow(GradPlacement.VARYING, GradPlacement.VARYING, edge="enters")
LEAVES_SPLIT = Flow(GradPlacement.VARYING, GradPlacement.VARYING, edge="leaves")
#: Back to another rank, where what is there goes on with it.
ELSEWHERE = Flow(gives=GradPlacement.UNKNOWN)

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
    return _Owned.apply(local)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch
