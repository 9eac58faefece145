"""What each word of the vocabulary plans, and how it prints."""

from __future__ import annotations

import pytest
import torch
from tiny import TinyPolicy, build
from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.nn import ColumnLinear, Replicated, RowLinear, VocabEmbedding
from shardcore.plan.steps.modules import SetAttribute, Swap
from shardcore.plan.steps.outputs import GatherOutputs
from shardcore.plan.steps.regions import EnterRegion
from shardcore.policy import HeadCounts, Policy
from shardcore.styles import (
    attribute,
    col,
    head,
    local_groups,
    local_heads,
    norm,
    outputs,
    partial,
    region,
    replicate,
    row,
    vocab,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.table = nn.Embedding(8, 8)
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LayerNorm(8)))
        self.bare = nn.Parameter(torch.zeros(2, 2))


def _steps(*rows):
    """Return the layouts, and the steps for whatever is not merely replicated because no row of the test names it."""
    text = " ".join(map(str, rows))
    rest = [name for name in ("one", "two", "table", "deep", "bare") if f"'{name}'" not in text]

    class Given(Policy):
        def module_policy(self):
            return {"Net": [*rows, replicate(*rest)]}

    plan = compile_plan(Given, Net(), ShardConfig(tensor_parallel_size=2))
    steps = [step for step in plan.steps if step.path and step.path.split(".")[0] not in rest]
    return {p.name: str(p.layout) for p in plan.parameters}, steps


def test_col_and_row():
    layouts, steps = _steps(col("one", gather_output=True), row("two", parallel_input=False))
    assert (layouts["one.weight"], layouts["one.bias"]) == ("split on dim 0", "split on dim 0")
    assert (layouts["two.weight"], layouts["two.bias"]) == ("split on dim 1", "replicated")
    assert steps == [
        Swap(path="one", target=ColumnLinear, options=(("gather_output", True),)),
        Swap(path="two", target=RowLinear, options=(("parallel_input", False),)),
    ]


def test_vocab_norm_partial_and_replicate():
    layouts, steps = _steps(vocab("table"), norm("one"), partial("two"), replicate("deep", "bare"))
    assert layouts["table.weight"] == "split on dim 0"
    assert layouts["one.bias"] == "replicated"
    assert layouts["two.bias"] == "replicated, gradient summed"
    assert layouts["deep.0.weight"] == layouts["deep.1.0.bias"] == layouts["bare"] == "replicated"
    assert {s.path: s.target for s in steps} == {
        "table": VocabEmbedding,
        "one": Replicated,
        "two": Replicated,
        "deep.0": Replicated,
        "deep.1.0": Replicated,
    }


def test_head_enters_by_itself_and_gathers():
    _, steps = _steps(head("one"))
    assert steps == [
        Swap(path="one", target=ColumnLinear, options=(("enters", False), ("gather_output", True))),
        EnterRegion(path="one", argument=("input", 0), members=("one",), row=None, block="one"),
    ]


def test_a_region_of_one_column_needs_no_enter():
    _, steps = _steps(region(col="one", row="two"))
    assert steps == [
        Swap(path="one", target=ColumnLinear, options=(("enters", False),)),
        Swap(path="two", target=RowLinear),
        EnterRegion(path="one", argument=("input", 0), members=("one",), row="two", block=""),
    ]


def test_a_region_of_several_columns_without_enter_uses_the_identity_of_the_input():
    class Wide(Net):
        pass

    class Given(Policy):
        def module_policy(self):
            rows = [region(col=("one", "deep.0"), row="two"), vocab("table"), norm("deep.1.0"), replicate("bare")]
            return {"Wide": rows}

    steps = compile_plan(Given, Wide(), ShardConfig(tensor_parallel_size=2)).steps
    assert not [s for s in steps if isinstance(s, EnterRegion)]
    assert [s.options for s in steps if s.path in ("one", "deep.0")] == [(("enters", True),)] * 2


def test_kv_heads_fewer_than_ranks():
    for ranks, replication in ((2, {}), (4, {"replication": 2}), (8, {"replication": 4})):
        plan = compile_plan(TinyPolicy, build(), ShardConfig(tensor_parallel_size=ranks))
        (k,) = [s for s in plan.steps if isinstance(s, Swap) and s.path == "model.layers.0.attention.k_proj"]
        assert dict(k.options) == {"enters": False, **replication}
        (groups, *_) = [s for s in plan.steps if isinstance(s, SetAttribute)]
        assert groups.value == 8 // ranks // max(1, 2 // ranks)


def test_outputs():
    class Given(TinyPolicy):
        def module_policy(self):
            rows = super().module_policy()
            return {**rows, "Decoder": [*rows["Decoder"], outputs(attentions="heads")]}

    plan = compile_plan(Given, build(), ShardConfig(tensor_parallel_size=2))
    assert [s for s in plan.steps if isinstance(s, GatherOutputs)] == [
        GatherOutputs(path="model", dims=(("attentions", 1, 8),))
    ]


def test_values_of_attributes():
    heads = HeadCounts(query=8, kv=2, ranks=4)
    assert (local_heads(heads), local_groups(heads)) == (2, 2)
    _, steps = _steps(attribute("one.in_features", 3), col("one"))
    assert SetAttribute(path="one", name="in_features", value=3) in steps


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (col("a", "b"), "col('a', 'b')"),
        (col("a", gather_output=True), "col('a', gather_output=True)"),
        (row("a", parallel_input=False), "row('a', parallel_input=False)"),
        (vocab("a", optional=True), "vocab('a')"),
        (head("a"), "head('a')"),
        (norm("a"), "norm('a')"),
        (partial("a"), "partial('a')"),
        (replicate("a", "b"), "replicate('a', 'b')"),
        (attribute("a.b", 3), "attribute('a.b', 3)"),
        (attribute("a.b", local_heads), "attribute('a.b', local_heads)"),
        (outputs(attentions="heads"), "outputs(attentions='heads')"),
        (region(col="a", row="b"), "region(col='a', row='b')"),
        (
            region(enter="m.x", col=("a", "b"), kv="k", row="c", unit="head"),
            "region(enter='m.x', col=('a', 'b'), kv='k', row='c', unit='head')",
        ),
    ],
)
def test_rows_print_as_they_were_written(made, text):
    assert str(made) == text
