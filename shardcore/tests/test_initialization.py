"""Models without a checkpoint: the values of their own code, the same on any mesh, one parameter at a time."""

from __future__ import annotations

import copy
import io
import re
import sys

import pytest
import torch
import torch.distributed as dist
from tiny import TinyLM, TinyPolicy, batch, build
from torch import nn
from torch.distributed.tensor import DTensor

import shardcore
from shardcore._progress import Progress
from shardcore.errors import AgreementError, ConfigError, PartlyShardedError, WrapError


class Initialised(TinyLM):
    """Every way of initialisation that models use: of modules, of their own, of one tensor from another."""

    def __init__(self, config):
        super().__init__(config)
        nn.init.trunc_normal_(self.model.positions, std=0.02)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.02 / (2 * config.layers) ** 0.5)
        with torch.no_grad():
            self.head.weight.copy_(self.model.embed.weight * 0.5)
            self.model.embed.weight[3].zero_()
        self.register_buffer("frequencies", 1.0 / 10000 ** (torch.arange(8) / 8), persistent=False)


class InitialisedPolicy(TinyPolicy):
    def module_policy(self):
        return {**super().module_policy(), "Initialised": super().module_policy()["TinyLM"]}


def config_of(**options):
    return build(**options).config


def values(model):
    named = (*model.named_parameters(), *model.named_buffers())
    return {n: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for n, t in named}


def initialized(seed, fields):
    torch.manual_seed(dist.get_rank())  # nothing of the user's generator is in the values
    config = config_of()
    model = shardcore.on_meta(Initialised, config)
    shardcore.shard(model, policy=InitialisedPolicy, **fields)
    before = torch.get_rng_state()
    assert shardcore.initialize(model, seed=seed) is model
    assert torch.equal(torch.get_rng_state(), before)
    ids = batch(0)
    loss = model(ids=ids, labels=ids)
    loss.backward()
    return values(model)


MESHES = {
    "tp 2": (2, {"tp": 2}),
    "shared heads": (4, {"tp": 4}),
    "tp 2, dp_shard 2": (4, {"tp": 2, "dp_shard_size": 2}),
    "dp_replicate 2": (2, {"dp_replicate_size": 2}),
}


def test_the_same_on_any_mesh(pool):
    (alone,) = pool.run(initialized, 3, {}, world=1)
    for name, (world, fields) in MESHES.items():
        for found in pool.run(initialized, 3, fields, world=world):
            assert found.keys() == alone.keys()
            for key, value in alone.items():
                assert torch.equal(found[key], value), (name, key)
    (other,) = pool.run(initialized, 4, {}, world=1)
    same = {key for key in alone if torch.equal(alone[key], other[key])}
    assert not torch.equal(alone["model.layers.0.mlp.gate.weight"], alone["model.layers.0.mlp.up.weight"])
    norms = {key for key in alone if "norm" in key}
    assert same == norms | {"frequencies"}
    # As the code says.
    assert torch.equal(alone["head.weight"][4:], alone["model.embed.weight"][4:] * 0.5)
    assert not alone["model.embed.weight"][3].any()
    assert not alone["model.embed.weight"][1].any()  # the row of the padding
    assert torch.equal(alone["frequencies"], 1.0 / 10000 ** (torch.arange(8) / 8))
    assert abs(alone["model.positions"].std() - 0.02) < 0.003
    assert abs(alone["model.layers.0.mlp.down.weight"].std() - 0.01) < 0.001


def on_the_meta_device():
    config = config_of(tied=True)
    with torch.device("meta"):
        model = Initialised(config)
    with torch.device("meta"):
        other = Initialised(config_of(layers=1))
    shardcore.shard(model, policy=InitialisedPolicy, tp=2)
    message = "nobody knows how this Initialised was built"
    with pytest.raises(ConfigError, match=message):
        shardcore.initialize(model)
    with pytest.raises(ConfigError, match=r"build made a Initialised whose model.layers.1.norm1.weight is not there"):
        shardcore.initialize(model, build=lambda: Initialised(config_of(layers=1)))
    with pytest.raises(ConfigError, match=r"whose head.bias is not there|whose model.embed.weight is \(98, 32\)"):
        shardcore.initialize(model, build=lambda: Initialised(config_of(vocab=98, tied=True)))
    del other
    assert all(p.is_meta for p in model.parameters())
    shardcore.initialize(model, build=lambda: Initialised(config))
    assert model.head.weight is model.model.embed.weight
    assert not model.frequencies.is_meta
    again = shardcore.on_meta(Initialised, copy.deepcopy(config))
    shardcore.shard(again, policy=InitialisedPolicy, tp=2)
    shardcore.initialize(again)
    for name, value in values(model).items():
        assert torch.equal(values(again)[name], value)


def test_models_that_were_built_on_the_meta_device(pool):
    pool.run(on_the_meta_device)


def differing():
    model = shardcore.shard(shardcore.on_meta(Initialised, config_of()), policy=InitialisedPolicy, tp=2)
    with pytest.raises(AgreementError, match=r"differ in initialize\(seed=\): 0 on rank 0, 1 on rank 1"):
        shardcore.initialize(model, seed=dist.get_rank())

    def failing():
        if dist.get_rank() == 1:
            raise OSError("no table")
        return Initialised(config_of())

    with pytest.raises((AgreementError, OSError), match="no table"):
        shardcore.initialize(model, build=failing)
    assert all(p.is_meta for p in model.parameters())
    shardcore.initialize(model, seed=0)


def test_ranks_that_differ(pool):
    pool.run(differing)


def failing_half_way():
    model = shardcore.shard(shardcore.on_meta(Initialised, config_of()), policy=InitialisedPolicy, tp=2)
    parts = []

    def advance(self, count):
        parts.append(count)
        if dist.get_rank() == 1 and len(parts) == 3:
            raise OSError("no memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "advance", advance)
        with pytest.raises(PartlyShardedError, match=r"initialising this Initialised failed half-way: .*no memory"):
            shardcore.initialize(model)
    for use in (lambda: model(ids=batch(0)), lambda: shardcore.initialize(model)):
        with pytest.raises(PartlyShardedError, match="The model is unusable; build it anew"):
            use()


def test_a_failure_half_way_is_one_on_all_ranks(pool):
    pool.run(failing_half_way)
    pool.run(failing_half_way_alone, world=1)


def failing_half_way_alone():
    model = shardcore.on_meta(Initialised, config_of())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Progress, "advance", lambda self, count: 1 / 0)
        with pytest.raises(PartlyShardedError, match="division by zero"):
            shardcore.initialize(model)
    with pytest.raises(PartlyShardedError, match="unusable"):
        model(ids=batch(0))


class Stream(io.StringIO):
    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


def shown(terminal):
    model = shardcore.shard(shardcore.on_meta(Initialised, config_of()), policy=InitialisedPolicy, tp=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", Stream(terminal))
        shardcore.initialize(model)
        return sys.stderr.getvalue()


def test_a_terminal_shows_how_far_it_is(pool):
    first, other = pool.run(shown, True)
    assert re.search(r"\rinitialising Initialised: 100%.*B/s\] *\n$", first)
    assert other == ""
    assert pool.run(shown, False) == ["", ""]


def emptied_of_values():
    """A buffer that the code computes has values after ``initialize`` alone: no state dict has them."""
    with torch.device("meta"):
        model = Initialised(config_of())
    shardcore.shard(model, policy=InitialisedPolicy, tp=2)
    words = r"to_empty would leave frequencies without values.*shardcore\.initialize\(model\).*weights=folder"
    with pytest.raises(WrapError, match=words):
        model.to_empty(device="cpu")
    assert all(tensor.is_meta for tensor in model.parameters())  # nothing was changed
    assert model.to_empty(device="meta") is model
    shardcore.initialize(model, build=lambda: Initialised(config_of()))
    wanted = Initialised(config_of())
    model.load_state_dict(wanted.state_dict())
    assert torch.equal(model.frequencies, wanted.frequencies)
    with pytest.raises(WrapError, match=words):
        model.to_empty(device="cpu")  # and loses what is there
    assert torch.equal(model.frequencies, wanted.frequencies)


def test_memory_without_values_is_not_for_buffers(pool):
    pool.run(emptied_of_values, world=2)
