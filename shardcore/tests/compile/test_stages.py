"""A policy's stages are checked against the model: what they name is there, and every parameter is held once."""

from __future__ import annotations

import pytest
import torch
from tiny import TinyPolicy, build
from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import GradientCheckpointConfig, ShardConfig
from shardcore.errors import PlanError
from shardcore.plan.steps.local import Recompute
from shardcore.policy import Policy, Stages
from shardcore.styles import replicate


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)


class Net(nn.Module):
    """A token that its configuration may leave out, blocks, a norm, a pooler, and a head that not every class has."""

    def __init__(self, *, pools: bool = True, has_head: bool = True) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(4)) if pools else None
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(4)
        self.pooler = nn.Sequential(nn.Linear(4, 4), nn.Tanh()) if pools else None
        if has_head:
            self.head = nn.Linear(4, 4, bias=False)
        self.register_buffer("mask", torch.ones(4))


GOOD = Stages(
    first="token", blocks="layers", last=("norm", "pooler.0", "head"), everywhere="mask", optional=("head", "pooler.0")
)


def plan(stages, model=None, tp=1, **fields):
    class NetPolicy(Policy):
        def module_policy(self):
            return {"Net": [replicate("")]}

    NetPolicy.stages = stages
    NetPolicy.__qualname__ = "NetPolicy"
    config = ShardConfig(tensor_parallel_size=tp, **fields)
    return compile_plan(NetPolicy, Net() if model is None else model, config)


def problems(stages, model=None, **fields):
    with pytest.raises(PlanError) as caught:
        plan(stages, model, **fields)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("tp", [1, 2])
def test_what_holds_each_parameter_is_in_the_plan(tp):
    made = plan(GOOD, tp=tp)
    assert {p.name: p.held_by for p in made.parameters if "bias" not in p.name} == {
        "token": ("token",),
        **{f"layers.{i}.{name}.weight": (f"layers.{i}",) for i in range(2) for name in ("up", "down")},
        "norm.weight": ("norm",),
        "pooler.0.weight": ("pooler.0",),
        "head.weight": ("head",),
    }
    assert list(made.stages.parts()) == list(GOOD.parts())


def test_what_a_model_leaves_out_is_left_out():
    made = plan(GOOD, Net(pools=False, has_head=False))
    assert list(made.stages.parts()) == [("blocks", "layers"), ("last", "norm"), ("everywhere", "mask")]
    assert all(p.held_by for p in made.parameters)


def test_a_list_of_blocks_may_be_left_out():
    model = Net()
    model.second = None
    stages = Stages(first="token", blocks=("layers", "second"), last=("norm", "pooler", "head"))
    assert plan(stages, model).stages.lists == ("layers",)


def test_without_stages_nothing_is_held_and_nothing_is_wrong():
    made = plan(None)
    assert made.stages is None
    assert {p.held_by for p in made.parameters} == {()}


def test_a_tied_weight_may_be_held_twice_and_by_any_of_its_names():
    held = {p.name: p.held_by for p in compile_plan(TinyPolicy, build(tied=True), ShardConfig.of(tp=2)).parameters}
    assert held["model.embed.weight"] == ("model.embed", "head")
    model = Net()
    model.head.weight = model.pooler[0].weight
    once = Stages(first="token", blocks="layers", last=("norm", "pooler"))
    assert {p.name: p.held_by for p in plan(once, model).parameters}["pooler.0.weight"] == ("pooler",)
    (problem,) = problems(once)  # an untied head
    assert problem.startswith("head: its parameters (1: weight) are held by no stage")


def test_a_name_that_does_not_exist():
    (wrong, loose) = problems(Stages(first="token", blocks="layers", last=("nrom", "pooler", "head")))
    assert wrong == (
        "nrom: Net has no submodule or parameter 'nrom'; its children are layers, norm, pooler, head\n"
        "    rule: NetPolicy.stages.last\n"
        "    next: correct the name for this version of the model; if some models of the class lack it, name it in "
        "Stages(optional=...) too"
    )
    assert loose == (
        "norm: its parameters (2: weight, bias) are held by no stage\n"
        "    rule: NetPolicy.stages\n"
        "    next: name it in first, blocks, between, last or everywhere"
    )


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("poler.0", "Net has no submodule 'poler'"),
        ("pooler.2", "Sequential (pooler) has no submodule or parameter '2'; its children are 0, 1"),
        ("norm.weight.x", "LayerNorm (norm) has no submodule 'weight'"),
        ("norm.normalized_shape", "LayerNorm (norm) has no submodule or parameter 'normalized_shape'"),
        ("", "Net has no submodule or parameter ''"),
    ],
)
def test_a_way_that_does_not_exist(name, says):
    wrong = Stages(first="token", blocks="layers", last=("norm", "pooler", "head", name))
    assert any(says in problem for problem in problems(wrong))


def test_only_the_last_part_of_a_name_may_be_absent():
    wrong = Stages(first="token", blocks="layers", last=("norm", "pooler", "head", "poler.0"), optional="poler.0")
    (problem,) = problems(wrong)
    assert problem.startswith("poler.0: Net has no submodule 'poler'")


def test_a_parameter_that_no_stage_holds():
    text = "\n".join(problems(Stages(blocks="layers", last=("norm", "pooler.1"))))
    assert "token: the parameter (4,) is held by no stage" in text
    assert "head: its parameters (1: weight) are held by no stage" in text
    assert "pooler.0: its parameters (2: weight, bias) are held by no stage" in text  # and not all of the pooler
    assert text.count("held by no stage") == 3


def test_a_whole_list_that_no_stage_holds_is_one_problem():
    (problem,) = problems(Stages(first="token", last=("norm", "pooler", "head")))
    said = "layers: its parameters (8: 0.up.weight, 0.up.bias, 0.down.weight, ...) are held by no stage"
    assert problem.startswith(said)


def test_a_parameter_of_the_list_itself_is_in_no_block():
    model = Net()
    model.layers.scale = nn.Parameter(torch.ones(4))
    (problem,) = problems(GOOD, model)
    assert problem.startswith("layers.scale: the parameter (4,) is held by no stage")


def test_names_that_hold_the_same():
    twice, below, block = problems(
        Stages(first=("token", "norm"), blocks="layers", last=("norm", "pooler", "pooler.0", "head", "layers.1"))
    )
    assert twice == "norm: first names it already\n    rule: NetPolicy.stages.last\n    next: keep one of them"
    assert below == (
        "pooler.0: it is below 'pooler', which last names already\n"
        "    rule: NetPolicy.stages.last\n"
        "    next: name it, or 'pooler', not both"
    )
    assert block.startswith("layers.1: it is below 'layers', which blocks names already")


def test_an_optional_name_has_to_be_in_a_part():
    (problem,) = problems(Stages(first="token", blocks="layers", last=("norm", "pooler", "head"), optional="haed"))
    assert problem == (
        "haed: it may be absent, but no part of the stages names it\n"
        "    rule: NetPolicy.stages.optional\n"
        "    next: remove it, or correct the name"
    )


@pytest.mark.parametrize(("name", "kind"), [("norm", "LayerNorm"), ("layers.0", "Block"), ("token", "Parameter")])
def test_blocks_that_are_no_list(name, kind):
    (problem, *_) = problems(Stages(blocks=name))
    assert problem == (
        f"{name}: it is a {kind}, and no list of blocks\n"
        "    rule: NetPolicy.stages.blocks\n"
        "    next: name an nn.ModuleList or nn.Sequential in blocks, and anything else in another part"
    )


def test_something_else_than_stages():
    (problem,) = problems({"first": "token"})
    assert problem.startswith("(the model itself): stages is a dict; wanted a shardcore.Stages or None")


def test_moved_stages_hold_what_they_held():
    moved = GOOD.under("model", then=("drop", "out"), optional="out")
    assert moved.lists == ("model.layers",)
    assert moved.optional == ("model.head", "model.pooler.0", "out")
    assert moved.holder("model.layers.11.up.weight") == "model.layers.11"
    assert moved.holder("model.token") == "model.token"
    assert moved.holder("out.weight") == "out"
    assert moved.holder("model.tokens") is moved.holder("model.layers.scale") is moved.holder("model") is None


def test_blocks_are_those_that_the_model_has():
    model = Net()
    model.second = None
    stages = Stages(first="token", blocks=("layers", "second"), last=("norm", "pooler", "head"))
    made = plan(stages, model, gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=1))
    assert [step.path for step in made.steps if isinstance(step, Recompute)] == ["layers.0"]
