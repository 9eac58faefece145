"""Models that change what their linears return in place: views, as of heads, or the tensor itself."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import shard
from torch import Tensor, nn

from shardcore.policy import Policy
from shardcore.styles import region
from shardcore_testing.parity import assert_close, assert_same_gradients


class Changing(nn.Module):
    """Divides a view of its first product, doubles the second in place, and adds the input to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.second = nn.Linear(8, 12)
        self.last = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).view(*x.shape[:-1], 2, -1)
        heads /= 3
        second = self.second(x)
        second *= 2
        out = self.last(heads.flatten(-2) * second)
        out += x.detach()
        return out


class One(nn.Module):
    """The same with a single linear before the last, which the region is entered at."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.last = nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.first(x).view(*x.shape[:-1], 2, -1)
        heads /= 3
        out = self.last(heads.flatten(-2))
        out += x.detach()
        return out


class InModule(Policy):
    def module_policy(self):
        return {"Changing": [region(enter="", col=("first", "second"), row="last")]}


class ByThemselves(Policy):
    def module_policy(self):
        return {"Changing": [region(col=("first", "second"), row="last")]}


class AtOne(Policy):
    def module_policy(self):
        return {"One": [region(col="first", row="last")]}


def runs(model, policy, shape):
    torch.manual_seed(0)
    reference = model().double()
    sharded = shard(copy.deepcopy(reference), policy)
    x = torch.randn(*shape, 8, dtype=torch.float64)
    for each in (reference, sharded):
        each(x).square().sum().backward()
    assert_close(reference(x), sharded(x), "output")
    assert_same_gradients(reference, sharded)
    with torch.no_grad():
        assert_close(reference(x), sharded(x), "output without gradients")


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize(
    ("model", "policy"), [(Changing, InModule), (Changing, ByThemselves), (One, AtOne)], ids=lambda c: c.__name__
)
def test_products_are_changed_in_place(pool, model, policy, shape):
    pool.run(runs, model, policy, shape, world=2)
