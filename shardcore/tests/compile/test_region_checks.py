"""What may be inside of a region: parameters whose gradients are summed, or that act on what has left it."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import Block, Net
from planned import failure_of
from torch import nn

import shardcore
from shardcore import Policy
from shardcore.styles import norm, partial, region, replicate, sequence, vocab
from shardcore_testing.parity import assert_close, assert_same_gradients

WIDTH, INNER = 8, 16


class Mlp(nn.Module):
    """Everything that may stand between the entry of a region and the end of its module."""

    def __init__(self):
        super().__init__()
        self.before, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.act = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH), nn.PReLU()
        self.table = nn.Embedding(1, 1)
        self.gamma = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x):
        inner = self.act(self.up(self.before(x))) * self.table(torch.zeros(1, dtype=torch.long))
        return self.last(self.down(inner)) * self.gamma


def net():
    return Net(WIDTH, [Block(WIDTH, Mlp()) for _ in range(2)])


class Right(Policy):
    after = ("mlp.last", "mlp.gamma")
    enter = "mlp"
    rest = (replicate("mlp.last", "mlp.gamma"), partial("mlp.before", "mlp.act", "mlp.table"))

    def module_policy(self):
        entered = region(enter=self.enter, col="mlp.up", row="mlp.down", after=self.after)
        tokens = sequence(scatter="blocks[0]", gather="norm")
        return {"Net": [norm("norm"), tokens], "Block": [norm("norm"), entered, *self.rest]}


def _problems(policy, model=None):
    return failure_of(model or net(), policy).problems


def _parity(native, policy, x, fields):
    sharded = shardcore.shard(copy.deepcopy(native), policy=policy, tp=2, **fields)
    for _ in range(2):
        outs = [model(x) for model in (native, sharded)]
        assert_close(*outs, "output")
        for out in outs:
            out.cos().sum().backward()
    if "partial_gradients" in fields:
        shardcore.reduce_partial_gradients(sharded)
    assert_same_gradients(native, sharded)


def parity(fields):
    torch.manual_seed(0)
    _parity(net().double(), Right, torch.randn(2, 7, WIDTH, dtype=torch.float64), fields)


@pytest.mark.parametrize(
    "fields",
    [{}, {"partial_gradients": "deferred"}, {"enable_sequence_parallelism": True}],
    ids=["default", "deferred", "sequence"],
)
def test_summed_inside_and_not_after(pool, fields):
    pool.run(parity, fields, world=2)


@pytest.mark.parametrize("word", [replicate, norm, vocab])
@pytest.mark.parametrize("name", ["before", "act", "table"])
def test_what_is_not_summed_is_a_problem(word, name):
    if word is vocab and name != "table":
        pytest.skip("no table")
    others = [n for n in ("before", "act", "table") if n != name]
    row = word(f"mlp.{name}")

    class Wrong(Right):
        rest = (replicate("mlp.last", "mlp.gamma"), partial(*(f"mlp.{n}" for n in others)), row)

    found = _problems(Wrong, nn.Sequential(net()) if word is norm else net())
    place = f"mlp.{name}."
    assert len(found) == 2 * len(list(Mlp().get_submodule(name).parameters())), "both blocks"
    for problem in found:
        assert place in problem.where
        assert problem.rule == row.text
        assert "left at" in problem.what
        assert "its gradient would be this rank's summand" in problem.what
        assert f"say partial('mlp.{name}')" in problem.todo
        assert f"after='{place}" in problem.todo


def test_what_runs_after_has_to_be_named():
    class Unsaid(Right):
        after = ()

    found = {problem.where for problem in _problems(Unsaid)}
    assert found == {f"blocks.{i}.mlp.{n}" for i in (0, 1) for n in ("last.weight", "last.bias", "gamma")}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"enter": None}, "after= without enter="),
        ({"after": ("mlp.last", "mlp.gamma", "norm")}, "after='norm' is not inside of 'mlp', where"),
        ({"after": ("mlp.last", "mlp.gamma", "mlp")}, "after='mlp' is not inside of 'mlp', where"),
        ({"after": ("mlp.last", "mlp.gamma", "mlp.up")}, "after='mlp.up' is or holds 'mlp.up' of the region itself"),
        ({"after": ("mlp.last", "mlp.gamma", "mlp.lost")}, "Mlp (mlp) has no submodule 'lost'"),
    ],
)
def test_after_that_cannot_be_meant(fields, says):
    policy = type("Wrong", (Right,), fields)
    assert any(says in problem.what for problem in _problems(policy))


class Loose(nn.Module):
    """A linear that enters by itself, in a module that nothing marks as a region."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.PReLU(), nn.Linear(INNER, WIDTH), nn.LayerNorm(WIDTH)
        )

    def forward(self, x):
        return self.body(x) + x


class LoosePolicy(Policy):
    between = partial("body.2")

    def module_policy(self):
        return {"Loose": [norm("body.0", "body.4"), region(col="body.1", row="body.3"), self.between]}


class LooseWrong(LoosePolicy):
    between = replicate("body.2")


def loose():
    torch.manual_seed(0)
    _parity(Loose().double(), LoosePolicy, torch.randn(2, 7, WIDTH, dtype=torch.float64), {})


def test_between_linears_of_a_sequential(pool):
    (problem,) = _problems(LooseWrong, Loose())
    assert problem.where == "body.2.weight"
    pool.run(loose, world=2)
