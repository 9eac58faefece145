"""The walk of a graph: whose gradient each tensor holds, and where that cannot be right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.gradients import ENTERS, LEAVES, Flow, GradPlacement
from shardcore.nn.region.flow import Graph, Mistake


class _Enters(Function):
    flow = ENTERS

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class _Leaves(_Enters):
    flow = LEAVES


class _Silent(_Enters):
    flow = None


class _Pairs(Function):
    flow = Flow(one_to_one=True)

    @staticmethod
    def forward(ctx: Any, name: str, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x.clone(), y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor]:
        return None, grads[0], grads[1]


def states(output: Tensor) -> dict[int, Any]:
    found = {id(leaf): got.state for leaf, got in Graph([output]).leaves}
    return {i: s.kind if isinstance(s, Mistake) else s for i, s in found.items()}


def test_the_walk() -> None:
    x, y = (torch.ones(4, requires_grad=True) for _ in range(2))
    enters, leaves, silent, pairs = _Enters.apply, _Leaves.apply, _Silent.apply, _Pairs.apply
    assert states(x * 2) == {id(x): GradPlacement.REPLICATE}
    assert states(leaves(x.sin())) == {id(x): GradPlacement.VARYING}
    assert states(leaves(enters(x).sin())) == {id(x): GradPlacement.REPLICATE}
    assert states(leaves(enters(x) * y)) == {id(x): GradPlacement.REPLICATE, id(y): GradPlacement.VARYING}
    assert states(x + leaves(enters(x))) == {id(x): GradPlacement.REPLICATE}
    entered = enters(x)
    assert states(entered + leaves(entered)) == {id(x): "joined"}
    assert states(enters(x)) == {id(x): "summed"}
    assert states(leaves(leaves(x))) == {id(x): "left"}
    assert states(silent(leaves(enters(x)))) == {id(x): GradPlacement.UNKNOWN}
    assert states(silent(x) + leaves(x)) == {id(x): GradPlacement.UNKNOWN}
    first, second = (x * 1).split([1, 3])
    assert states(first + leaves(second).sum()) == {id(x): "joined"}
    first, second = pairs("of two", x * 1, y * 1)
    assert states(first + leaves(second)) == {id(x): GradPlacement.REPLICATE, id(y): GradPlacement.VARYING}


def test_outputs_without_a_graph() -> None:
    assert Graph([torch.ones(4)]).leaves == []
    assert Graph([torch.ones(4, requires_grad=True)]).leaves == []
