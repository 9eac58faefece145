"""Backwards in two halves give every parameter the gradient of one, however a stage comes by what it computes with."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input

from shardcore.pipeline import Cut, PrunedModel, Stage, StageTracer
from shardcore.pipeline.torch_stage import add_gradients
from shardcore.plan import Stages


class Adds(nn.Module):
    """A block that reads what it is given besides; two of its layers read one parameter, which no other block has."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.scale = nn.Linear(4, 1, bias=False)  # after those of which each is read by one layer alone

    def forward(self, x: Tensor, given: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        inner = torch.tanh(x @ (self.inner.weight * self.scale.weight) + (0 if given is None else given))
        return x + (inner @ (self.outer.weight * self.scale.weight)).softmax(-1) + (0 if bias is None else bias)


class Net(nn.Module):
    stages: Any = Stages(first="embed", blocks="blocks", last="head")

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Adds() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().sum()


class Twice(Net):
    """Each block is called twice, as a group of ALBERT's layers is."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(block(x))
        return self.head(x).square().sum()


class Biased(Net):
    """A table, which all stages hold, is given to every block, as DeBERTa's relative positions are."""

    stages = Stages(first="embed", blocks="blocks", last="head", everywhere="table")

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        bias, x = self.table(torch.zeros(1, dtype=torch.long)), self.embed(x)
        for block in self.blocks:
            x = block(x, bias=bias)
        return self.head(x).square().sum()


class Decodes(Net):
    """A decoder that begins in the middle of a stage, with an embedding of its own."""

    stages = Stages(first="embed", blocks=("blocks", "decoder"), between="norm", last="head", everywhere="start")

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.start = nn.LayerNorm(4), nn.Embedding(5, 4)
        self.decoder = nn.ModuleList(Adds() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        y, x = self.start(torch.arange(5)), self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        for block in self.decoder:
            y = block(y, given=x)
        return self.head(y).square().sum()


def step(stages: list[Stage], call: dict[str, Any], metadata: Any) -> set[str]:
    """Run the stages forward, and back in halves: the gradients of parameters come last.

    Returns:
        At what kinds of nodes parameters meet what arrived that meet it more than once.
    """
    arrived: list[Tensor] = []
    flight = []
    for stage in stages:
        left = stage(call, arrived, metadata)
        flight.append((stage, arrived, list(left) if isinstance(left, tuple) else [left]))
        arrived = [] if stage.is_last else [tensor.detach().requires_grad_() for tensor in left]
    grads: Any = None
    later = []
    for stage, arrived, left in reversed(flight[1:]):
        grads, groups = stage_backward_input(left, grads, arrived, iter(stage.parameters()))
        later.append((stage, groups))
    torch.autograd.backward(flight[0][2], grads)
    nodes = [group["intermediates"] for _, groups in later for group in groups]
    kinds = {node.name() for some in nodes if len(some) > 1 for node in some}
    for stage, groups in later:
        add_gradients(stage.parameters(), groups)
    return kinds


@pytest.mark.parametrize("frozen", [(), ("embed", "start")], ids=["trained", "frozen"])
@pytest.mark.parametrize("kind", [Net, Twice, Biased, Decodes])
def test_two_halves_are_the_whole(kind, frozen):
    torch.manual_seed(0)
    model = kind().double()
    for name in frozen:
        if hasattr(model, name):
            getattr(model, name).requires_grad_(False)
    call = {"x": torch.randn(5, 4, dtype=torch.float64)}
    cut = Cut.of(model, kind.stages, 2 if kind is not Decodes else 3)
    metadata = StageTracer(model, cut)(call)
    stages = [Stage(PrunedModel(copy.deepcopy(model), cut, [index]), index, splits=True) for index in range(len(cut))]
    for _ in range(2):  # gradients are added up
        model(**call).backward()
        kinds = step(stages, call, metadata)
    # Products with what arrived, at which nothing goes further back, and what was made to depend on it.
    assert kinds == ({"MmBackward0", "JoinBackward"} if kind is Biased else {"MmBackward0"})
    held = [dict(stage.model.named_parameters()) for stage in stages]
    for name, parameter in model.named_parameters():
        grads = [own[name].grad for own in held if name in own and own[name].grad is not None]
        wanted = 0 if parameter.grad is None else parameter.grad
        torch.testing.assert_close(sum(grads), wanted, rtol=1e-12, atol=1e-12)


def test_parameters_come_in_one_order_on_all_ranks():
    # Some of their gradients are summed over ranks in that order: a set of names has another one in each process.
    model = Net()
    stage = Stage(PrunedModel(model, Cut.of(model, Net.stages, 2), [1]), 1)
    assert [id(p) for p in stage.parameters()] == [id(p) for b in model.blocks[3:] for p in b.parameters()] + [
        id(p) for p in model.head.parameters()
    ]
