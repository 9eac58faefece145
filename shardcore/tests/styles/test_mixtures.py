"""What the word `experts` refuses when a plan is compiled."""

from __future__ import annotations

import pytest
import torch
from experts_net import Expert, MixturePolicy, Stacked, build
from needs import FUSED
from torch import nn

from shardcore import PlanError, ShardConfig
from shardcore.compile import compile_plan
from shardcore.nn import ReplicatedLayout, SegmentedLayout, ShardedLayout
from shardcore.styles import col, experts, region, replicate, row

RULE = MixturePolicy.rule


def plan(model, tp=2, rule=RULE, gate=MixturePolicy.of_shared_gate):
    class Own(MixturePolicy):
        pass

    Own.rule, Own.of_shared_gate = rule, gate
    return compile_plan(Own, model, ShardConfig(tensor_parallel_size=tp))


@FUSED
def test_a_layout_for_every_form():
    found = {
        kind: {p.name.removeprefix("blocks.0.mixture."): p.layout for p in plan(build(kind)).parameters}
        for kind in ("stacked", "transposed", "list")
    }
    summed = ReplicatedLayout(partial_gradient=True)
    assert found["stacked"]["experts.gate_up_proj"] == SegmentedLayout(2, 1)
    assert found["stacked"]["experts.down_proj"] == ShardedLayout(2)
    assert found["transposed"]["experts.gate_up_proj"] == SegmentedLayout(2, 2)
    assert found["transposed"]["experts.down_proj"] == ShardedLayout(1)
    assert found["list"]["experts.3.w1.bias"] == ShardedLayout(0)
    assert found["list"]["experts.3.w2.weight"] == ShardedLayout(1)
    assert {layouts["gate.weight"] for layouts in found.values()} == {summed}
    assert SegmentedLayout(2, 1).shape((3, 22, 5), 4, 3) == (3, 4, 5)
    assert str(SegmentedLayout(2, 1)) == "2 segments, each split on dim 1"


@FUSED
def test_the_plan_says_what_happens():
    lines = str(plan(build("stacked")))
    assert "enters with 'hidden' for slices of its experts, sums what they return" in lines


def interleaved(model):
    for block in model.blocks:
        block.mixture.experts.is_concatenated = False


def with_another_bias(model):
    for block in model.blocks:
        block.mixture.experts.down_proj_bias = nn.Parameter(torch.zeros(5, 7))


def odd(model):
    for block in model.blocks:
        block.mixture.experts.down_proj = nn.Parameter(torch.zeros(5, 6, 10))


def small(model):
    for block in model.blocks:
        block.mixture.experts = Stacked(False, inner=3)


def biased_rows(model):
    for block in model.blocks:
        block.mixture.experts[2] = Expert(biased=True)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def of_another_class(model):
    for block in model.blocks:
        block.mixture.experts[1].w3 = Scaled(6, 11, bias=False)


def of_other_sizes(model):
    for block in model.blocks:
        block.mixture.experts[1].w1 = nn.Linear(6, 12)


@pytest.mark.parametrize(
    ("kind", "change", "tp", "message"),
    [
        ("stacked", interleaved, 2, "has 11 gates, each beside its feature, which 2 ranks do not divide"),
        (
            "stacked",
            with_another_bias,
            2,
            "down_proj_bias (5, 7); wanted gate_up_proj (E, 2I, H) or up_proj (E, I, H), and",
        ),
        ("stacked", odd, 2, "Stacked has the parameters gate_up_proj (5, 22, 6), down_proj (5, 6, 10); wanted"),
        ("stacked", small, 4, "is split along 2 segments of dim 1, which leaves the last of 4 ranks without a part"),
        ("list", biased_rows, 2, "its bias would be added on each rank, before the summands are added up"),
        ("list", of_another_class, 2, "Scaled computes something else than torch.nn.Linear"),
        ("list", of_other_sizes, 2, "it has out_features 12, but w2 that follows has in_features 11"),
    ],
)
def test_weights_that_cannot_be_split(kind, change, tp, message):
    model = build(kind)
    change(model)
    with pytest.raises(PlanError) as error:
        plan(model, tp)
    assert message in str(error.value)
    assert "covered by no rule" not in str(error.value)


@FUSED
def test_experts_with_biases_are_slices_only():
    with pytest.raises(PlanError, match="experts with biases are not given whole to the axis ep"):
        compile_plan(MixturePolicy, build("in turns"), ShardConfig.of(tp=2, dp=2, ep=2).resolve(4))


SHARED = {"shared_col": ("shared_expert.w1", "shared_expert.w3"), "shared_row": "shared_expert.w2"}
GATE = MixturePolicy.of_shared_gate


@pytest.mark.parametrize(
    ("kind", "rule", "gate", "message"),
    [
        ("list", experts("mixture", **SHARED), GATE, "col= and row= do not name its linears"),
        ("stacked", experts("mixture", shared_row="shared_expert.w2"), GATE, "shared_col= and shared_row= do not name"),
        ("stacked", experts("mixture", router="no", **SHARED), GATE, "Mixture (mixture) has no submodule 'no'"),
        ("stacked", experts("mixture", weights="no", **SHARED), GATE, "Mixture (mixture) has no submodule 'no'"),
        ("stacked", RULE, replicate("mixture.shared_gate"), "its gradient would be this rank's summand"),
        (
            "stacked",
            experts("mixture"),
            col("mixture.shared_expert.w1"),
            "it would enter again what entered the experts",
        ),
        ("stacked", RULE, row("mixture.shared_gate"), "its output would be summed before blocks.0.mixture"),
    ],
)
def test_rules_that_do_not_fit(kind, rule, gate, message):
    with pytest.raises(PlanError) as error:
        plan(build(kind), rule=rule, gate=gate)
    assert message in str(error.value)


def test_a_region_beside_the_experts():
    beside = region(enter="mixture", col="mixture.shared_expert.w1", row="mixture.shared_expert.w2")
    with pytest.raises(PlanError, match=r"it would enter again what entered the experts at blocks\.0\.mixture"):
        plan(build("stacked"), rule=experts("mixture"), gate=beside)


def test_two_rules_for_one_block():
    with pytest.raises(PlanError, match=r"two rules say how the experts at blocks\.0\.mixture are entered"):
        plan(build("stacked"), gate=experts("mixture"))


def test_where_there_are_none():
    with pytest.raises(PlanError, match="Block has no submodule 'other'"):
        plan(build("stacked"), rule=experts("other"))
    with pytest.raises(PlanError) as error:  # what it would have covered is not
        plan(build("stacked"), rule=experts("other", optional=True))
    assert "the parameter (5, 22, 6) is covered by no rule" in str(error.value)
    assert "'other'" not in str(error.value)
