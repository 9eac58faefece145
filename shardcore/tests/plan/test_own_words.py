"""A word is a rule, perhaps a step, and a module: nothing else of the core knows the words that there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import own_words
import pytest
import torch
import torch.distributed as dist

import shardcore
from shardcore import PlanError, ShardConfig, compile_plan
from shardcore.nn import ParallelMixin
from shardcore.policy import Rule, Scope
from shardcore_planner.communication import collectives
from shardcore_testing.parity import equal_on_ranks


def test_words_that_the_core_does_not_know_train_exactly(pool):
    pool.run(own_words.trains, world=2)


def test_a_plan_shows_orders_and_counts_them():
    plan = compile_plan(own_words.NetPolicy, own_words.Net(), ShardConfig(tensor_parallel_size=2))
    assert "norm\n    Replicated\n    capped at 0.3\n    behaves as Capped > Replicated > the native class" in str(plan)
    assert "weight (7, 4) -> (7, 2)  split on dim 1" in str(plan)
    assert [c.payload for c in collectives(plan) if c.where == "norm"] == ["nothing, but it is counted"]


def test_their_conflicts_are_reported():
    class Twice(own_words.NetPolicy):
        limits = (0.3, 0.4)

    with pytest.raises(PlanError, match="two limits for norm"):
        compile_plan(Twice, own_words.Net(), ShardConfig(tensor_parallel_size=2))


class Noisy(ParallelMixin):
    """A model that draws a number beside its native forward."""

    keeps_name: ClassVar[bool] = True

    def forward(self, x):
        return super().forward(x) + torch.rand(())


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyRule(Rule):
    def plan(self, scope: Scope) -> None:
        scope.swap("", Noisy)


class NoisyPolicy(own_words.NetPolicy):
    def module_policy(self):
        rules = super().module_policy()
        return {"Net": [*rules["Net"], NoisyRule(text="noisy()")]}


def test_a_word_for_the_model_itself_draws_from_its_stream(pool):
    pool.run(_draws, world=2)


def _draws() -> None:
    torch.manual_seed(0)
    model = shardcore.shard(own_words.Net(), policy=NoisyPolicy, tp=2)
    torch.manual_seed(dist.get_rank())
    users = torch.get_rng_state()
    x = torch.ones(2, 5, own_words.WIDTH)
    outs = []
    for _ in range(2):
        shardcore.manual_seed(model, 3)
        outs += [model(x), model(x)]
        assert equal_on_ranks(outs[-1])
    assert torch.equal(outs[0], outs[2])
    assert not torch.equal(outs[0], outs[1])
    assert torch.equal(users, torch.get_rng_state())
