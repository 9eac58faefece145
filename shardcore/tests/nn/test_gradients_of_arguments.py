"""A tensor that needs a gradient and comes into a region beside its input is refused, wherever it hides."""

from __future__ import annotations

import copy
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shardcore import Policy
from shardcore.errors import NotSupportedError
from shardcore.nn.region.contents import needs_gradient
from shardcore.styles import enter_arg, region
from shardcore_testing.parity import assert_close, assert_same_gradients

LEARNED = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
FIXED = torch.tensor(1.5, dtype=torch.float64)


@dataclass
class Held:
    fixed: Any
    scale: Any = None


class Cache:
    """Holds states of this rank's heads."""

    def __init__(self, states):
        self.states = states


Pair = namedtuple("Pair", "first second")


def _circular():
    value = [FIXED]
    value.append(value)
    return value


@pytest.mark.parametrize(
    ("value", "place"),
    [
        (LEARNED, ""),
        (FIXED, None),
        ({"scale": LEARNED}, "['scale']"),
        (((FIXED, LEARNED),), "[0][1]"),
        ([FIXED, {"a": [Held(FIXED, (LEARNED,))]}], "[1]['a'][0].scale[0]"),
        (OrderedDict(a=FIXED, b=LEARNED), "['b']"),
        (Pair(1, LEARNED), "[1]"),
        ({LEARNED}, "[0]"),
        (Held, None),
        (Cache(LEARNED), None),
        (_circular(), None),
        ([_circular(), LEARNED], "[1]"),
        ("text", None),
        (None, None),
    ],
)
def test_where_a_gradient_is_needed(value, place):
    assert needs_gradient(value) == place


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
    enters = False

    def module_policy(self):
        also = "extra" if self.enters else ()
        entries = [enter_arg("", "extra")] if self.enters else []
        return {"Net": [*entries, region(enter="mlp", also=also, col="mlp.up", row="mlp.down")]}


class EntersPolicy(NetPolicy):
    enters = True


CONTAINERS = [
    (lambda t: {"scale": t}, lambda e: e["scale"]),
    (lambda t: ((t,),), lambda e: e[0][0]),
    (Held, lambda e: e.fixed),
]


def refused(policy):
    torch.manual_seed(0)
    native = Net().double()
    sharded = shardcore.shard(copy.deepcopy(native), policy=policy, tp=2)
    x = torch.randn(3, 8, dtype=torch.float64)
    for wrap, find in CONTAINERS:
        for learned in (LEARNED, LEARNED * 2):
            with pytest.raises(NotSupportedError, match=r"needs a gradient|wanted one tensor"):
                sharded(x, wrap(learned), find)
        with torch.no_grad():
            assert_close(native(x, wrap(LEARNED), find), sharded(x, wrap(LEARNED), find), "without a backward")
        for model in (native, sharded):
            model(x, wrap(FIXED), find).square().sum().backward()
    sharded(x, Cache(LEARNED), lambda cache: cache.states)
    assert_same_gradients(native, sharded)


@pytest.mark.parametrize("policy", [NetPolicy, EntersPolicy])
def test_containers(pool, policy):
    pool.run(refused, policy, world=2)
