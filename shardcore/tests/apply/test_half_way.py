"""What a policy does around sharding, and code of a policy that fails half-way."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from plain import Gain, ShardformerStyle, plain
from tiny import TinyLM, TinyPolicy, batch, build, randomize, shard
from torch import nn

import shardcore
from shardcore.errors import (
    AlreadyShardedError,
    PartlyShardedError,
)
from shardcore.policy import Policy
from shardcore.styles import attribute, replicate
from shardcore_shardformer import ModulePolicyDescription
from shardcore_testing.parity import assert_close


def twice():
    model = shard(build())
    for again, text in (
        (
            model,
            "this TinyLM cannot be sharded: it was sharded before. Build the model anew to shard it in another way.",
        ),
        (model.model, "this Decoder cannot be sharded: it was sharded before."),
        (model.model.layers[0], "this Block cannot be sharded: its submodule "),
        (nn.Sequential(model.model.layers[1].mlp), "this Sequential cannot be sharded: its submodule '0.gate' was"),
    ):
        with pytest.raises(AlreadyShardedError) as caught:
            shardcore.shard(again, policy=TinyPolicy, tp=2)
        assert str(caught.value).startswith(text)
    plain = nn.Sequential(nn.Linear(2, 2))
    plain[0].weight = model.model.layers[0].mlp.up.weight
    with pytest.raises(
        AlreadyShardedError, match=r"its parameter '0\.weight' is a DTensor already, from an earlier shard\(\), fully_"
    ):
        shardcore.shard(plain, policy=TinyPolicy, tp=2)


class Preprocessed(TinyPolicy):
    """Brings a plan of its own, for a model that `preprocess` has changed."""

    def preprocess(self):
        self.model.head = nn.Linear(32, 40, dtype=torch.float64)
        randomize(self.model.head)

    def new_model_class(self):
        return Renamed

    def postprocess(self):
        self.model.done = (type(self.model.head).__name__, tuple(self.model.head.weight.shape))


class Renamed(TinyLM):
    def tell(self):
        return "renamed"


def hooks_of_a_policy():
    reference = build()
    reference.head = nn.Linear(32, 40, dtype=torch.float64)
    randomize(reference.head)
    model = shard(build(), Preprocessed)
    assert model.done == ("ColumnLinear", (40, 32))
    assert model.tell() == "renamed"
    assert type(model).__name__ == "Renamed"
    assert_close(reference(batch()), model(batch()), "output")


class FailsEverywhere(TinyPolicy):
    def postprocess(self):
        raise ArithmeticError("late")


class FailsLate(FailsEverywhere):
    def postprocess(self):
        if dist.get_rank() == 1:
            super().postprocess()


class FailsEarly(TinyPolicy):
    def preprocess(self):
        if dist.get_rank() == 1:
            raise ArithmeticError("early")


class CutsWrong(ShardformerStyle):
    def module_policy(self):
        return {**super().module_policy(), Gain: ModulePolicyDescription(param_replacement=[cut_wrong])}


def cut_wrong(module, process_group):
    raise ArithmeticError("cut")


class ShapesWrong(ShardformerStyle):
    def module_policy(self):
        return {**super().module_policy(), Gain: ModulePolicyDescription(param_replacement=[shape_wrong])}


def shape_wrong(module, process_group):
    module.gain = nn.Parameter(module.gain.detach()[:5].clone())


class NoSubclass(TinyPolicy):
    def new_model_class(self):
        return nn.Linear


class Stubborn(nn.Module):
    """An attribute that exists and cannot be set."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @property
    def heads(self):
        return 3

    def forward(self, x):
        return self.linear(x)


class StubbornPolicy(Policy):
    def module_policy(self):
        return {"Stubborn": [replicate("linear"), attribute("heads", 2)]}


def half_way():
    for model, policy, text in (
        (
            build(),
            FailsEverywhere,
            "FailsEverywhere.postprocess failed while the TinyLM was being sharded: ArithmeticErr",
        ),
        (build(), FailsLate, "ArithmeticError: late"),
        (build(), FailsEarly, "ArithmeticError: early"),
        (plain(), CutsWrong, "param_replacement cut_wrong failed at 'blocks.0.gain': ArithmeticError: cut"),
        (plain(), ShapesWrong, r"param_replacement at 'blocks.0.gain': its parameter 'gain' of Gain has shape \(5,\)"),
        (build(), NoSubclass, "NoSubclass.new_model_class returned Linear, which is not a subclass of TinyLM"),
        (Stubborn(), StubbornPolicy, "heads"),
    ):
        with pytest.raises(PartlyShardedError, match=text):
            shardcore.shard(model, policy=policy, tp=2)
        with pytest.raises(PartlyShardedError, match=text):
            model(batch())
        with pytest.raises(AlreadyShardedError):
            shardcore.shard(model, policy=policy, tp=2)


def test_sharding_twice(pool):
    pool.run(twice, world=2)


def test_what_a_policy_does_around_sharding(pool):
    pool.run(hooks_of_a_policy, world=2)


def test_user_code_that_fails_half_way(pool):
    pool.run(half_way, world=2)
