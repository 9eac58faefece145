"""Every gradient owns its storage: what is added to one, or scaled, reaches no other."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from blocks import Block, Mlp
from torch import nn

import shardcore
from shardcore import Policy
from shardcore._torch import CAN_TRACE
from shardcore.styles import norm, partial, region, replicate
from shardcore_testing.parity import assert_close, assert_gradients_own_storage, assert_same_gradients

WIDTH = 8


class Tokens(nn.Module):
    """Two parameters that receive one gradient, and one that receives a view of it where there is one row."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.first, self.places = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, 6, WIDTH))

    def forward(self, x):
        x = torch.cat([self.first.expand(x.size(0), -1, -1), x + (self.a + self.b)], 1)
        return x + self.places


class Shift(nn.Module):
    """The same between split activations, four of each at a time."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x):
        return (x.unflatten(-1, (-1, 4)) + (self.a + self.b)).flatten(-2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        inside = nn.Sequential(Shift(), nn.Tanh())
        self.tokens, self.block = Tokens(), Block(WIDTH, Mlp(WIDTH, 16, inside))

    def forward(self, x):
        return self.block(self.tokens(x))


class NetPolicy(Policy):
    def module_policy(self):
        inside = [region(enter="mlp", col="mlp.up", row="mlp.down"), partial("mlp.function.0")]
        return {"Net": [replicate("tokens")], "Block": [norm("norm"), *inside]}


def _twins(**fields):
    torch.manual_seed(0)
    native = Net().double()
    return native, shardcore.shard(copy.deepcopy(native), policy=NetPolicy, tp=2, **fields)


def _x(rows):
    return torch.randn(rows, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(rows))


def _clip(models):
    norms = [nn.utils.clip_grad_norm_(model.parameters(), 0.1) for model in models]
    assert_close(norms[0], norms[1], "norm")
    assert norms[0] > 0.1


def trained(rows, fields):
    models = _twins(**fields)
    for _ in range(3):
        for model in models:
            model(_x(rows)).pow(2).sum().backward()
        assert_gradients_own_storage(models[1])
    assert_same_gradients(*models)
    if fields:
        shardcore.reduce_partial_gradients(models[1])
        assert_gradients_own_storage(models[1])
    _clip(models)
    assert_same_gradients(*models)

    for model in models:
        model.zero_grad()
        loss = model(_x(rows)).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_gradients(*models)


@pytest.mark.parametrize("fields", [{}, {"partial_gradients": "deferred"}], ids=["default", "deferred"])
@pytest.mark.parametrize("rows", [1, 3])
def test_accumulated_retained_and_clipped(pool, rows, fields):
    pool.run(trained, rows, fields, world=2)


def compiled(backend):
    native, sharded = _twins()
    torch._dynamo.reset()
    traced = torch.compile(sharded, backend=backend, fullgraph=CAN_TRACE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own doings while it traces
        for _ in range(3):
            for model in (native, traced):
                model(_x(1)).pow(2).sum().backward()
            assert_gradients_own_storage(sharded)
    assert_same_gradients(native, sharded)


@pytest.mark.nightly
@pytest.mark.filterwarnings("default")  # torch warns of its own doings while it compiles
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])  # inductor drops clones that are outputs
def test_compiled(pool, backend):
    pool.run(compiled, backend, world=2, timeout=100)
