"""What members of a region do besides being called once."""

from __future__ import annotations

import copy

import torch
from tiny import shard
from torch import nn

from shardcore.policy import Policy
from shardcore.styles import region
from shardcore_testing.parity import assert_same_gradients


class Twice(nn.Module):
    """Calls one member of its region twice."""

    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(self.up(x) * self.gate(x).tanh() + self.up(x).sin())


class TwicePolicy(Policy):
    def module_policy(self):
        return {"Sequential": [region(enter="0", col=("0.up", "0.gate"), row="0.down")]}


def called_twice():
    reference = nn.Sequential(Twice()).double()
    sharded = shard(copy.deepcopy(reference), TwicePolicy)
    x = torch.randn(2, 3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for model in (reference, sharded):
        model(x.clone().requires_grad_()).tanh().sum().backward()
    assert_same_gradients(reference, sharded)


def test_a_member_that_is_called_twice(pool):
    pool.run(called_twice, world=2)
