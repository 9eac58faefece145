"""A tensor that needs a gradient and comes into a region beside its input is told before a backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardcore
from shardcore import Policy
from shardcore.errors import NotSupportedError, PlanError
from shardcore.styles import enter_arg, region
from shardcore_testing.parity import assert_close, assert_same_gradients

LEARNED = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
FIXED = torch.tensor(1.5, dtype=torch.float64)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, extra, find):
        return self.down(self.up(x) * find(extra))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x, extra, find):
        return x + self.mlp(x, extra, find=find)


class NetPolicy(Policy):
    entries = ()

    def module_policy(self):
        return {"Net": [*self.entries, region(enter="mlp", col="mlp.up", row="mlp.down")]}


class EntersPolicy(NetPolicy):
    entries = (enter_arg("", "extra"),)


CONTAINERS = [
    (lambda t: t, lambda e: e),
    (lambda t: {"scale": t}, lambda e: e["scale"]),
    (lambda t: ((t,),), lambda e: e[0][0]),
]


def told(policy):
    torch.manual_seed(0)
    native = Net().double()
    sharded = shardcore.shard(copy.deepcopy(native), policy=policy, tp=2)
    x = torch.randn(3, 8, dtype=torch.float64)
    for wrap, find in CONTAINERS[policy is EntersPolicy :]:
        for model in (native, sharded):
            model(x, wrap(FIXED), find).square().sum().backward()
        for learned in (LEARNED, LEARNED * 2):
            with pytest.raises((NotSupportedError, PlanError), match=r"the argument at position 1|wanted one tensor"):
                sharded(x, wrap(learned), find)
        with torch.no_grad():
            assert_close(native(x, wrap(LEARNED), find), sharded(x, wrap(LEARNED), find), "without a backward")
    assert_same_gradients(native, sharded)


@pytest.mark.parametrize("policy", [NetPolicy, EntersPolicy])
def test_in_containers_too(pool, policy):
    pool.run(told, policy, world=2)
