"""How the kit tells that a backward recomputes; needs no ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardcore_testing.checks_training import recomputed


class Net(nn.Module):
    """As models of libraries do, it recomputes where it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(2))
        self.recomputes = True

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes and self.training else layer(x)
        return x.sum()


@pytest.mark.parametrize(("name", "blocks"), [("layers", 2), ("", 1)])
def test_what_a_backward_calls_again(name, blocks):
    subject: Any = SimpleNamespace(inputs=lambda model: {"x": torch.ones(1, 3)}, loss=lambda out: out)
    model = Net().eval()
    again = recomputed(subject, model, name)
    assert len(again) == blocks
    assert all(again)
    model.recomputes = False
    assert not any(recomputed(subject, model, name))
