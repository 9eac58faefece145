"""What does not fit between a policy and a model: all of it is said at once, with place, rule and way out."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import token_net
from planned import failure_of, plan_of, policy_of
from tiny import TinyPolicy, build
from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import GradientCheckpointConfig, ShardConfig
from shardcore.errors import PlanError
from shardcore.plan import Stages
from shardcore.plan.steps.local import Recompute
from shardcore.policy import Heads, Policy
from shardcore.styles import attribute, col, head, local_heads, norm, outputs, region, replicate, row, vocab


def _problems(model, rows, tp=2, checks=()):
    return failure_of(model, policy_of(rows, checks), tp)


class Mixed(nn.Module):
    """Fits `MixedPolicy` in no way at all."""

    def __init__(self):
        super().__init__()
        self.config = type("C", (), {"heads": 6, "kv": 4})()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.embed = nn.Embedding(10, 4)
        self.out = nn.Linear(4, 10, bias=False)
        self.out.weight = self.embed.weight
        self.lonely = nn.LayerNorm(4)


class MixedPolicy(Policy):
    checks = (Heads("heads"), Heads("absent"))

    def module_policy(self):
        return {
            "Mixed": [
                col("first", "third"),
                row("first"),
                norm("second"),
                vocab("embed"),
                replicate("out"),
                attribute("first.num_heads", 2),
                norm("first.weight.what", optional=True),
            ],
            "Renamed": [norm("a"), col("b")],
        }


def test_everything_that_is_wrong_is_said_at_once():
    with pytest.raises(PlanError) as caught:
        plan_of(Mixed(), MixedPolicy, tp=4)
    assert str(caught.value) == (
        "MixedPolicy does not fit Mixed at tensor_parallel_size 4: 10 problems; nothing was changed.\n"
        "  1. (the model itself): 6 query heads (heads) cannot be split over 4 ranks: whole heads are needed on each "
        "rank\n"
        "    rule: MixedPolicy.checks\n"
        "    next: use a tensor_parallel_size of 1, 2, 3, 6\n"
        "  2. (the model itself): model.config has no attribute 'absent'\n"
        "    rule: MixedPolicy.checks\n"
        "    next: name the attribute that counts heads in Heads(...)\n"
        "  3. (the model itself): Mixed has no submodule 'third'; its children are first, second, embed, out, lonely\n"
        "    rule: col('first', 'third')\n"
        "    next: correct the name for this version of the model, or say optional=True\n"
        "  4. first: Linear has no attribute 'num_heads'; setting it would create one that nothing reads\n"
        "    rule: attribute('first.num_heads', 2)\n"
        "    next: remove the rule, or name the attribute that this version of the model uses\n"
        "  5. (the model itself): no module of class 'Renamed'; the model has Embedding, LayerNorm, Linear, Mixed\n"
        "    rule: 'Renamed': [norm('a'), col('b')]\n"
        "    next: correct the class name for this version of the model, or make the rules optional=True\n"
        "  6. first.weight: the parameter is claimed by col('first', 'third') and row('first')\n"
        "    rule: col('first', 'third')\n"
        "    next: keep one of them\n"
        "  7. first.bias: the parameter is claimed by col('first', 'third') and row('first')\n"
        "    rule: col('first', 'third')\n"
        "    next: keep one of them\n"
        "  8. embed.weight: tied weights embed.weight, out.weight would lie differently: embed.weight is split on dim "
        "0, out.weight is replicated\n"
        "    rule: vocab('embed')\n"
        "    next: give all names of one parameter the same style\n"
        "  9. lonely.weight: the parameter (4,) is covered by no rule\n"
        "    rule: (none)\n"
        "    next: add a rule for it: region, vocab, head, norm, or replicate if every rank shall hold it whole\n"
        "  10. lonely.bias: the parameter (4,) is covered by no rule\n"
        "    rule: (none)\n"
        "    next: add a rule for it: region, vocab, head, norm, or replicate if every rank shall hold it whole"
    )


def test_a_parameter_claimed_with_two_layouts_is_one_problem_and_no_tie():
    error = _problems(nn.Sequential(nn.Linear(4, 4)), {"Sequential": [col("0"), row("0")]})
    assert [p.where for p in error.problems] == ["0.weight", "0.bias"]


def test_kv_heads_that_cannot_be_shared():
    model = build(heads=12, kv_heads=6, hidden=48)
    with pytest.raises(PlanError) as caught:
        plan_of(model, tp=4)
    assert [(p.what, p.todo) for p in caught.value.problems] == [
        (
            "6 key/value heads (kv_heads) cannot be shared by 4 ranks: one number has to divide the other",
            "use a tensor_parallel_size that divides 6 or is a multiple of it",
        )
    ]
    plan_of(model, tp=3)


def test_more_ranks_than_heads():
    with pytest.raises(PlanError, match=r"8 query heads \(heads\) cannot be split over 16 ranks"):
        plan_of(tp=16)


def test_a_renamed_submodule_is_named_at_every_place():
    """H14."""
    model = build(layers=3)
    for layer in model.model.layers:
        layer.mlp.w_up = layer.mlp.up
        del layer.mlp.up
    with pytest.raises(PlanError) as caught:
        plan_of(model)
    missing = [p for p in caught.value.problems if "(mlp) has no submodule 'up'" in p.what]
    assert [p.where for p in missing] == [f"model.layers.{i}" for i in range(3)]
    uncovered = {p.where for p in caught.value.problems if "covered by no rule" in p.what}
    assert {f"model.layers.{i}.mlp.w_up.weight" for i in range(3)} <= uncovered


def test_a_renamed_class_is_a_problem_unless_its_rows_are_optional():
    class Block2(nn.Module):
        pass

    rows = {"Sequential": [replicate("0")], Block2: [norm("a")]}
    error = _problems(nn.Sequential(nn.Linear(2, 2)), rows)
    assert "no module of class" in error.problems[0].what
    plan_of(nn.Sequential(nn.Linear(2, 2)), policy_of({**rows, Block2: [norm("a", optional=True)]}))


def test_a_missing_attribute_is_a_problem():
    """H13."""
    error = _problems(nn.Sequential(nn.Linear(4, 4)), {"Sequential": [replicate("0"), attribute("0.num_heads", 1)]})
    assert [p.what for p in error.problems] == [
        "Linear has no attribute 'num_heads'; setting it would create one that nothing reads"
    ]


def test_options_and_classes_that_do_not_fit():
    for rows in (
        {"Sequential": [col("1"), replicate("0")]},
        {"Sequential": [head("1"), replicate("0")]},
        {"Sequential": [vocab("0"), norm("1")]},
        {"Sequential": [region(col="0", row="1")]},
    ):
        error = _problems(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), rows)
        assert any("replaces torch.nn.modules" in p.what for p in error.problems)


def test_regions_whose_linears_do_not_fit_together():
    model = nn.ModuleDict({"a": nn.Linear(8, 6), "b": nn.Linear(8, 4), "k": nn.Linear(8, 5)})
    error = _problems(model, {"ModuleDict": [region(col="a", row="b"), replicate("k")]})
    assert error.problems[0].where == "a"
    assert error.problems[0].what == (
        "it has out_features 6, but b at the end of its region has in_features 8; equal sizes are needed so that both "
        "are cut at the same places"
    )
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "k": nn.Linear(8, 5)})
    model.config = type("C", (), {"h": 4})()
    error = _problems(model, {"ModuleDict": [region(col="a", kv="k", row="b", unit="head")]}, 2, (Heads("h"),))
    assert "its 5 output features are not whole heads: the configuration counts 4" in str(error)
    error = _problems(model, {"ModuleDict": [region(enter="x", col="a", row="b"), replicate("k")]})
    assert "ModuleDict has no submodule 'x'" in str(error)


def test_rows_that_count_heads_need_the_check():
    """Without it they would do nothing."""
    model = nn.Sequential(nn.Linear(4, 4))
    error = _problems(
        model, {"Sequential": [replicate("0"), attribute("0.in_features", local_heads), outputs(attentions="heads")]}
    )
    assert [(p.rule, p.what) for p in error.problems] == [
        (
            "attribute('0.in_features', local_heads)",
            "the rule needs the numbers of heads, which the policy does not declare",
        ),
        ("outputs(attentions='heads')", "the rule needs the numbers of heads, which the policy does not declare"),
    ]
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    assert len(_problems(model, {"ModuleDict": [region(col="a", row="b", unit="head")]}).problems) == 1


def test_problems_come_in_the_order_of_the_row():
    """Not in that of a set, which differs with the hash seed of each rank."""

    class Convolutions(TinyPolicy):
        def module_policy(self):
            return {**super().module_policy(), "Block": [region(enter="mlp", col=NAMES, row="norm2")]}

    model = build()
    for layer in model.model.layers:
        for name in NAMES:
            setattr(layer, name, nn.Identity())
    with pytest.raises(PlanError) as caught:
        compile_plan(Convolutions, model, ShardConfig(tensor_parallel_size=2))
    found = [p.where for p in caught.value.problems if p.where.startswith("model.layers.0.") and "Identity" in p.what]
    assert found == [f"model.layers.0.{name}" for name in NAMES]


NAMES = tuple(f"part{number}" for number in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrong(Recompute):
    def check(self, plan):
        yield self.problem("it does not fit", "leave it")


def test_steps_that_a_policy_makes_are_checked_too():
    class Recomputing(token_net.ModelPolicy):
        stages = Stages(first="embeddings", blocks="stack.blocks", last="head")

        def recompute(self, path, block):
            return Wrong(path=path)

    checkpointing = GradientCheckpointConfig(gradient_checkpointing_ratio=1)
    with pytest.raises(PlanError, match=r"stack\.blocks\.0: it does not fit"):
        compile_plan(
            Recomputing,
            token_net.Model(),
            ShardConfig(tensor_parallel_size=2, gradient_checkpoint_config=checkpointing),
        )


def test_a_module_inside_and_outside_of_the_blocks():
    model = token_net.Model()
    model.stack.blocks[0].norm = model.embeddings.norm
    config = ShardConfig(tensor_parallel_size=2, enable_sequence_parallelism=True)
    with pytest.raises(PlanError, match=r"all of them as embeddings\.norm, which is the same module"):
        compile_plan(token_net.ModelPolicy, model, config)


def test_linears_between_split_tokens_that_enter_by_themselves():
    class Loose(token_net.ModelPolicy):
        def module_policy(self):
            return {**super().module_policy(), "Block": [norm("norm"), col("up"), row("down")]}

    config = ShardConfig(tensor_parallel_size=2)
    compile_plan(Loose, token_net.Model(), config)
    with pytest.raises(PlanError, match=r"under sequence parallelism it enters by itself, after its module has read"):
        compile_plan(Loose, token_net.Model(), ShardConfig.of(config, enable_sequence_parallelism=True))
