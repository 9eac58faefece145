"""A mixer with heads of its own numbers and sizes: projections of unequal widths, and a convolution over them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from planned import plan_of, policy_of, problems_of
from tiny import randomize, shard
from torch import nn

from shardcore.policy import Heads, Policy
from shardcore.styles import attribute, by_heads, local_heads, local_kv_heads, region, replicate, segments
from shardcore_testing.parity import assert_close, assert_same_gradients

KEY, VALUE, WIDTH = 3, 2, 8
MIXERS = (("projection", 4, 4), ("projection", 8, 4), ("group", 8, 4), ("group", 4, 2), ("projection", 4, 1))
ROLES, SIZES = ("key", "key", "query"), (KEY, KEY, VALUE)


class Mixer(nn.Module):
    def __init__(self, by, values, keys):
        super().__init__()
        self.by, self.values, self.keys = by, values, keys
        channels = 2 * keys * KEY + values * VALUE
        self.fused, self.scale = nn.Linear(WIDTH, channels), nn.Parameter(torch.ones(values))
        self.conv = nn.Conv1d(channels, channels, 3, groups=channels, padding=2)
        self.out = nn.Linear(values * VALUE, WIDTH)

    def forward(self, x):
        rows, tokens, _ = x.shape
        mixed, each = self.fused(x), self.values // self.keys
        if self.by == "group":
            parts = mixed.view(rows, tokens, self.keys, -1).split([KEY, KEY, each * VALUE], -1)
            mixed = torch.cat([part.flatten(2) for part in parts], -1)
        mixed = self.conv(mixed.mT)[..., :tokens].mT
        called = F.conv1d(mixed.mT, self.conv.weight, self.conv.bias, groups=self.conv.groups, padding=2)
        mixed = mixed + called[..., :tokens].mT
        q, k, v = mixed.split([self.keys * KEY, self.keys * KEY, self.values * VALUE], -1)
        q, k = (t.view(rows, tokens, self.keys, KEY).repeat_interleave(each, 2) for t in (q, k))
        v = v.view(rows, tokens, self.values, VALUE) * self.scale[:, None]
        states = torch.einsum("bthk,bthv->bthkv", k, v).cumsum(1)
        return self.out(torch.einsum("bthk,bthkv->bthv", q, states).flatten(2))


class Model(nn.Module):
    def __init__(self, by="projection", values=4, keys=4):
        super().__init__()
        self.heads, self.mixer, self.first = 8, Mixer(by, values, keys), nn.Linear(WIDTH, WIDTH)
        self.config = type("Config", (), {"heads": 8, "values": values, "keys": keys})()

    def forward(self, x):
        return self.first(x) + self.mixer(x)


class MixerPolicy(Policy):
    checks = (Heads("heads"), Heads("values", kv="keys", of="Mixer"))

    def module_policy(self):
        fused = segments("fused", ROLES, by=self.model.mixer.by, sizes=SIZES)
        channels = segments("conv", ROLES, sizes=SIZES)
        return {
            "Mixer": [
                region(enter="", col=fused, row="out", unit="head", partial=channels),
                by_heads("scale"),
                attribute("values", local_heads),
                attribute("keys", local_kv_heads),
            ],
            "Model": [replicate("first"), attribute("heads", local_heads)],
        }


def trains(ranks):
    for by, values, keys in MIXERS:
        model = Model(by, values, keys).double()
        randomize(model)
        sharded = shard(copy.deepcopy(model), MixerPolicy)
        assert (model.heads, model.mixer.values) == (sharded.heads * ranks, sharded.mixer.values * ranks)
        x = torch.randn(2, 5, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(0))
        for turn in range(2):
            losses = [m(x + turn).square().mean() for m in (model, sharded)]
            assert_close(*losses, f"loss {by} {values} {keys}")
            for loss in losses:
                loss.backward()
        assert_same_gradients(model, sharded)


@pytest.mark.parametrize("world", [2, 4])
def test_training(pool, world):
    pool.run(trains, world, world=world)


def _problems(partial, model=None):
    rule = region(enter="", col=segments("fused", ROLES, sizes=SIZES), row="out", unit="head", partial=partial)
    rules = {"Mixer": [rule, by_heads("scale")], "Model": [replicate("first")]}
    return problems_of(model or Model(), policy_of(rules, (Heads("values", kv="keys", of="Mixer"),)))


def test_what_does_not_fit():
    (what, *_) = _problems(segments("conv", ROLES, sizes=(KEY, KEY, KEY)))
    assert (
        "its 32 output features are not key, key, query of 4 query and 4 key/value heads: that would be 36 features"
        in what
    )
    grouped = Model()
    grouped.mixer.conv.groups = 4
    assert any(
        "Conv1d has the parameters bias, weight" in what for what in _problems(segments("conv", ROLES), model=grouped)
    )
    with pytest.raises(ValueError, match="sizes= has one for each"):
        segments("conv", ROLES, sizes=(1, 2))
    with pytest.raises(ValueError, match="need to know what"):
        segments("conv", 3, sizes=(1, 2, 3))


def test_heads_of_a_class_are_its_own():
    fused = segments("fused", ROLES, sizes=SIZES)
    assert repr(fused) == "segments('fused', ('key', 'key', 'query'), sizes=(3, 3, 2))"
    rules = {
        "Mixer": [region(enter="", col=fused, row="out", unit="head", partial=segments("conv", ROLES, sizes=SIZES))]
    }
    checks = (Heads("values", kv="keys", of="Mixer"),)
    with_heads = {**rules, "Model": [replicate("first"), attribute("heads", local_heads)]}
    assert any(
        "which the policy does not declare" in what for what in problems_of(Model(), policy_of(with_heads, checks))
    )
    refused = problems_of(Model(values=3, keys=3), policy_of(rules, checks))
    assert any("3 query heads (values) cannot be split over 2 ranks" in what for what in refused)
    assert "groups = 16" in plan_of(Model(), MixerPolicy).render()
