"""Which modules are mixtures of experts that ranks may have slices of."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from shardcore_scaffold.facts import Facts
from shardcore_scaffold.mixtures import mixtures_of

WIDTH, INNER, COUNT = 6, 4, 3


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COUNT, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight).softmax(-1)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(COUNT, INNER, WIDTH))
        self.down_proj = nn.Parameter(torch.randn(COUNT, WIDTH, INNER))

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        made = [functional.silu(x @ up.T) @ down.T for up, down in zip(self.up_proj, self.down_proj, strict=True)]
        return sum(score[..., None] * each for score, each in zip(scores.unbind(-1), made, strict=True))


class Mixture(nn.Module):
    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.gate, self.experts, self.after = Router(), Experts(), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.experts(x, self.gate(x)))


class Block(nn.Module):
    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.mixture = Mixture(after)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixture(x)


@pytest.mark.parametrize(
    ("after", "adds"),
    [
        (nn.Identity(), True),
        (nn.Linear(WIDTH, WIDTH, bias=False), True),
        (nn.Linear(WIDTH, WIDTH), False),
        (nn.LayerNorm(WIDTH), False),
    ],
)
def test_a_mixture_returns_what_its_experts_add_up(after: nn.Module, adds: bool) -> None:
    """Ranks add up what a mixture makes of their parts of each expert."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList([Block(after)])}).double()
    facts = Facts(model, lambda model: model["blocks"][0](torch.randn(2, 5, WIDTH, dtype=torch.float64)))
    assert [mixture.path for mixture in mixtures_of(facts)] == ["blocks.0.mixture"] * adds
