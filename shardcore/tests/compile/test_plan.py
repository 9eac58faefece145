"""Compiling: pure, and complete in what it says of every parameter and module."""

from __future__ import annotations

import copy
import json
import types

import pytest
import token_net
import torch
from planned import plan_of, policy_of
from tiny import TinyLM, TinyPolicy, build
from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import PlanError
from shardcore.nn import ColumnLinear, Replicated, VocabEmbedding, mixins
from shardcore.plan.steps.base import ApplyContext, Phase
from shardcore.plan.steps.modules import ScopeRandomness, SetAttribute, Swap
from shardcore.plan.steps.regions import EnterRegion
from shardcore.styles import attribute, col, head, region, replicate, vocab


def test_values_may_be_unhashable():
    rows = {
        "Linear": [attribute("in_features", [1, {2: 3}])],
        "Sequential": [col("0")],
    }
    plan = plan_of(nn.Sequential(nn.Linear(4, 4)), policy_of(rows))
    assert json.loads(json.dumps(plan.to_json())) == plan.to_json()
    assert hash(plan) == hash(plan_of(nn.Sequential(nn.Linear(4, 4)), policy_of(rows)))


def test_nothing_is_changed_and_meta_suffices():
    model = build()
    before = {name: (id(m), type(m), dict(vars(m))) for name, m in model.named_modules()}
    values = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    plan = plan_of(model, tp=4)
    assert before == {name: (id(m), type(m), dict(vars(m))) for name, m in model.named_modules()}
    assert all(torch.equal(values[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    with torch.device("meta"):
        on_meta = TinyLM(model.config)
    assert plan_of(on_meta.double(), tp=4).digest == plan.digest
    assert all(p.is_meta for p in on_meta.parameters())
    with pytest.raises(PlanError):
        plan_of(model, tp=16)
    assert before == {name: (id(m), type(m), dict(vars(m))) for name, m in model.named_modules()}


def test_what_a_plan_says():
    plan = plan_of(build(tied=True), tp=4)
    layouts = {p.name: str(p.layout) for p in plan.parameters}
    assert layouts["model.embed.weight"] == "split on dim 0"
    assert layouts["model.positions"] == "replicated"
    prefix = "model.layers.0.attention"
    assert [layouts[f"{prefix}.{n}_proj.weight"] for n in "qkvo"] == [
        "split on dim 0",
        "split on dim 0, gathered by groups of 2 ranks",
        "split on dim 0, gathered by groups of 2 ranks",
        "split on dim 1",
    ]
    assert layouts[f"{prefix}.o_proj.bias"] == "replicated"
    assert layouts[f"{prefix}.q_norm.bias"] == "replicated, gradient summed"
    (tied,) = [p for p in plan.parameters if p.aliases]
    assert (tied.name, tied.aliases, tied.shape) == ("model.embed.weight", ("head.weight",), (97, 32))
    swaps = {s.path: s.target for s in plan.steps if isinstance(s, Swap)}
    assert swaps[f"{prefix}.q_proj"] is ColumnLinear
    assert swaps["model.embed"] is VocabEmbedding
    assert swaps["model"] is Replicated
    assert [s.value for s in plan.steps if isinstance(s, SetAttribute)] == [2, 2]
    opened = [s for s in plan.steps if isinstance(s, EnterRegion)]
    assert [s.argument for s in opened] == [("input", 0)] + [("hidden", 0)] * 2 + [("x", 0)] * 2
    phases = [s.phase for s in plan.steps]
    assert phases == sorted(phases)
    assert {type(s): s.phase for s in plan.steps} == {
        Swap: Phase.SWAP,
        SetAttribute: Phase.CHANGE,
        EnterRegion: Phase.ENTER,
        ScopeRandomness: Phase.SCOPE,
    }
    text = str(plan)
    assert f"TinyLM by {TinyPolicy.__module__}.TinyPolicy, tp 4, digest {plan.digest[:12]}" in text
    assert "weight (97, 32) -> (25, 32)  split on dim 0, tied to head.weight" in text
    assert "RowLinear" in text
    assert "enters with 'x' for mlp.gate, mlp.up, leaves at mlp.down" in text


def test_a_tensor_parallel_size_of_one_has_no_steps():
    plan = plan_of(tp=1)
    assert plan.steps == ()
    assert len(plan.parameters) == len(list(build().parameters()))
    assert compile_plan(TinyPolicy(), build(), ShardConfig()).steps == ()
    with pytest.raises(PlanError, match="covered by no rule"):  # a policy is checked at any size
        plan_of(nn.Linear(2, 2), policy_of({}), tp=1)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(5, 4)
        self.labels = nn.Linear(4, 2)
        self.column = nn.Linear(4, 5)
        self.a, self.b = nn.Linear(4, 2), nn.Linear(2, 4)


def test_sizes_that_leave_a_rank_empty_are_replicated():
    """H41: 2 labels and 5 rows on 4 ranks."""
    rows = {"Small": [vocab("rows"), head("labels"), col("column"), region(col="a", row="b")]}
    plan = plan_of(Small(), policy_of(rows), tp=4)
    assert {str(p.layout) for p in plan.parameters} == {"replicated"}
    assert {s.target for s in plan.steps} == {Replicated}
    plan = plan_of(Small(), policy_of(rows), tp=2)
    split = {p.name for p in plan.parameters if "split" in str(p.layout)}
    assert split == {
        "rows.weight", "labels.weight", "labels.bias", "column.weight", "column.bias", "a.weight", "a.bias", "b.weight"
    }  # fmt: skip
    assert {str(p.layout) for p in plan_of(Small(), policy_of(rows), tp=3).parameters if p.name == "rows.weight"} == {
        "split on dim 0"
    }


def test_one_rank_may_ask_for_a_split_sequence():
    config = ShardConfig(tensor_parallel_size=1, enable_sequence_parallelism=True)
    plan = compile_plan(token_net.ModelPolicy, token_net.Model(), config)
    assert [step for step in plan.steps if step.splits] == []

    class Whole(token_net.ModelPolicy):
        def module_policy(self):
            return {**super().module_policy(), "Model": [replicate("head")]}

    with pytest.raises(PlanError, match="the policy does not say between which modules tokens may be split"):
        compile_plan(Whole, token_net.Model(), config)


def test_outputs_inside_of_blocks_are_gathered_too():
    model = token_net.Model()
    config = ShardConfig(tensor_parallel_size=2, enable_sequence_parallelism=True)
    ctx = ApplyContext(model, compile_plan(token_net.ModelPolicy, model, config).steps, object())
    assert ctx.tokens_below("") is ctx.tokens_below("stack") is ctx.tokens_below("stack.blocks.0.norm")
    assert ctx.tokens_below("stack.blocks.0.norm") is not None
    assert ctx.tokens_below("embeddings") is None


def test_the_scope_goes_around_what_is_there_in_the_end():
    ctx = ApplyContext(nn.Sequential(nn.Linear(2, 2)), (), types.SimpleNamespace())
    commit = ScopeRandomness(path="0").prepare(ctx)
    ctx.model[0] = nn.ReLU()
    assert commit() is ctx.model[0]
    assert [b.__name__ for b in mixins(ctx.model[0])] == ["RngScope"]
