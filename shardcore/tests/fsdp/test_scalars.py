"""Parameters without dims over the data axes: whole everywhere, their gradients the mean over the replicas."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import randomize
from torch import nn
from torch.distributed.tensor import DTensor

import shardcore
from shardcore import PlanError, Policy
from shardcore.mesh.context import context_of
from shardcore.styles import partial, region, replicate
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, whole


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.scale, self.shift = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.down(torch.tanh(self.up(x))) * self.scale.exp() + self.shift


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(2))
        self.temperature = nn.Parameter(torch.zeros(()))
        self.blocks[1].shift = self.blocks[0].shift  # tied

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x * self.temperature.exp()


class NetPolicy(Policy):
    def module_policy(self):
        return {
            "Scaled": [region(col="up", row="down"), self.read],
            "Net": [replicate("temperature")],
        }

    read = replicate("scale", "shift")


class PartialPolicy(NetPolicy):
    read = partial("scale", "shift")


def build():
    net = Net().double()
    randomize(net)
    return net


def trains(fields):
    reference = build()
    reference.blocks[0].scale.requires_grad_(False)
    model = shardcore.shard(copy.deepcopy(reference), policy=NetPolicy, **fields)
    context = context_of(model)
    replicas = context.sizes.replicas
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        assert ours.shape == theirs.shape
    assert model.blocks[0].shift is model.blocks[1].shift
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=True) for net in (reference, model)]
    for step in range(3):
        if step == 1:
            model.to("cpu")  # as trainers do; torch puts new tensors into the parameters, without their hooks
        if step == 2:  # trained later
            for net in (reference, model):
                net.blocks[0].scale.requires_grad_(True)
        for part in range(2):  # gradients accumulate
            for replica in range(replicas):
                generator = torch.Generator().manual_seed(100 * step + 10 * part + replica)
                x = torch.randn(3, 6, generator=generator, dtype=torch.float64)
                (reference(x).pow(2).mean() / replicas).backward()
                if replica == context.replica:
                    model(x).pow(2).mean().backward()
        assert_same_gradients(reference, model)
        norms = [nn.utils.clip_grad_norm_(net.parameters(), 0.1) for net in (reference, model)]
        assert_close(norms[0], whole(norms[1]), "norm of all gradients")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(reference, model)
    with torch.no_grad():
        x = torch.ones(1, 6, dtype=torch.float64)
        assert_close(reference(x), model(x), "a forward without gradients")
    other = build()
    model.load_state_dict({name: t.detach() for name, t in other.state_dict().items()})
    assert_same_parameters(other, model)


MESHES = [
    (2, {"tp": 1, "dp": 2}),
    (2, {"tp": 1, "dp_replicate_size": 2}),
    (4, {"tp": 2, "dp": 2}),
    (4, {"tp": 1, "dp_replicate_size": 2, "dp_shard_size": 2}),
]


@pytest.mark.parametrize(("world", "fields"), MESHES)
def test_replicas_train_as_one_model(pool, world, fields):
    pool.run(trains, fields, world=world)


def refused():
    with pytest.raises(PlanError, match="without dims, whose gradient would stay partial until it is summed"):
        shardcore.shard(build(), policy=PartialPolicy, tp=2, dp=2, partial_gradients="deferred")


def test_what_stays_partial_is_refused(pool):
    pool.run(refused, world=4)
