"""A word is a rule, perhaps a step, and a module: nothing else of the core knows the words that there are."""

from __future__ import annotations

import own_words
import pytest

from shardcore import PlanError, ShardConfig, compile_plan
from shardcore.planner.communication import collectives


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
