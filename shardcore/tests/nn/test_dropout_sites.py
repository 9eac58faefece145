"""Which modules draw random numbers, and are given other ones on each rank where activations are split."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from tiny import shard
from torch import nn

import shardcore
from shardcore.nn.randomness import DropoutSites
from shardcore.policy import Policy
from shardcore.styles import col, region, row


class Functional(nn.Module):
    def __init__(self, attention_dropout):
        super().__init__()
        self.attention_dropout = attention_dropout
        self.dropout_enabled = True


class DropPath(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop_prob = 0.1


def places(sites):
    return len(sites.probabilities) + len(sites._others)


def test_dropout_sites():
    functional = Functional(0.0)
    sites = DropoutSites([nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), DropPath())], [functional])
    assert places(sites) == 3
    assert sites.live()
    sites = DropoutSites([nn.Dropout(0.0)], [functional])
    assert not sites.live()
    functional.attention_dropout = 0.3  # changed later
    assert sites.live()
    functional.eval()
    assert not sites.live()
    assert places(DropoutSites([], [nn.Sequential(nn.Dropout(0.5))])) == 1
    deeper = nn.Sequential(nn.Sequential(nn.Dropout(0.5)))
    assert places(DropoutSites([], [deeper])) == 0, "of a block only what it holds itself"


def _noise(x, rate):
    return x * (torch.rand(x.shape) > rate)


class Rate(nn.Module):
    """Drops, and is named after nothing of the kind."""

    def __init__(self, rate=0.5):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        return self._masked(x) if self.training else x

    def _masked(self, x):
        return _noise(x, self.rate)


class Quiet(nn.Module):
    """Names random functions where they do not run."""

    def __init__(self):
        super().__init__()
        self.normal = nn.Identity()
        self.reset()

    def reset(self):
        self.start = torch.rand(1)

    def forward(self, x):
        return self.normal(x)


def test_random_functions_in_code():
    assert [places(DropoutSites([module])) for module in (Rate(), nn.RReLU(), Quiet(), nn.Linear(2, 2))] == [1, 1, 0, 0]
    model = nn.Sequential(Rate())
    assert DropoutSites([model]).live()
    assert places(DropoutSites([], [model])) == 1
    assert not DropoutSites([model.eval()]).live()


class Rated(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(8, 64), Rate(), nn.Linear(64, 8))

    def forward(self, x):
        return x + self.inside(x)


class RatedPolicy(Policy):
    def module_policy(self):
        return {"Rated": [region(enter="inside", col="inside.0", row="inside.2")]}


class ApartPolicy(Policy):
    """Linears that enter by themselves."""

    def module_policy(self):
        return {"Rated": [col("inside.0"), row("inside.2")]}


class Unknown(Rate):
    """Nothing in its code says what it does."""

    def forward(self, x):
        return x * getattr(torch, "ra" + "nd")(x.shape).gt(self.rate)


def unnamed_masks(mode, policy, kind):
    """H6 where the stochastic module is known by nothing; MC dropout has it in training mode below an eval root."""
    torch.manual_seed(0)
    model = nn.Sequential(Rated(), Rated())
    for block in model:
        block.inside[1] = kind()
    model = shard(model, policy).train(mode == "train")
    masks, after = [], []
    for block in model:
        block.inside[1].train(mode != "eval")
        block.inside[1].register_forward_hook(lambda module, args, out: masks.append(out != 0))
        block.register_forward_hook(lambda module, args, out: after.append(torch.get_rng_state()))
    shardcore.manual_seed(model, 3)
    before = torch.get_rng_state()
    with torch.set_grad_enabled(mode == "train"):
        for _ in range(2):
            model(torch.ones(4, 8))
    assert torch.equal(before, torch.get_rng_state())
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (masks, after))
    (masks, after), (others, also) = everybody
    assert len(masks) == 4
    assert not any(torch.equal(one, other) for one, other in zip(masks, others, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(after, also, strict=True)), "the shared stream"
    assert not any(torch.equal(mask, other) for i, mask in enumerate(masks) for other in masks[:i])


@pytest.mark.parametrize("kind", [Rate, Unknown])
@pytest.mark.parametrize("policy", [RatedPolicy, ApartPolicy])
@pytest.mark.parametrize("mode", ["train", "MC dropout", "eval"])
def test_masks_of_modules_that_are_not_named_after_dropout(pool, mode, policy, kind):
    if kind is Rate and mode == "eval":
        pytest.skip("draws nothing")
    pool.run(unnamed_masks, mode, policy, kind, world=2)


class Loose(nn.Module):
    """A block whose MLP is no module: its dropout is the block's own."""

    def __init__(self):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(8, 64), nn.Dropout(0.5), nn.Linear(64, 8)

    def forward(self, x):
        return x + self.fc2(self.drop(self.fc1(x)))


class LoosePolicy(Policy):
    def module_policy(self):
        return {"Loose": [region(col="fc1", row="fc2")]}


def loose_masks():
    """H6 where a column linear itself is the entry."""
    model = shard(nn.Sequential(Loose(), Loose()), LoosePolicy).train()
    masks = []
    for layer in model:
        layer.drop.register_forward_hook(lambda module, args, out: masks.append(out != 0))
    model(torch.ones(4, 8))
    model[0](torch.ones(4, 8))  # on the generators of ranks that are seeded alike, where dropouts have to be known
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, masks)
    assert all(len(masks) == 3 for masks in everybody)
    assert not any(torch.equal(one, other) for one, other in zip(*everybody, strict=True))


def test_masks_between_loose_linears(pool):
    pool.run(loose_masks, world=2)
