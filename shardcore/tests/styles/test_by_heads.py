"""What `by_heads` plans, and what it refuses; that it trains rightly is in ``tests/nn/test_head_parameters.py``."""

from __future__ import annotations

import pytest
import torch
from planned import plan_of, policy_of, problems_of
from torch import nn

from shardcore.plan.steps.modules import SetAttribute
from shardcore.styles import by_heads, partial, region, replicate


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.table, self.conv = nn.Embedding(5, 4), nn.Conv1d(8, 8, 3, groups=4)
        self.scale, self.places = nn.Parameter(torch.ones(4, 1, 1)), nn.Parameter(torch.ones(8, 2))
        self.heads, self.odd, self.inner = 4, 3, nn.Identity()

    def forward(self, x):
        return self.down(self.up(x))


ENTERED = region(enter="", col="up", row="down")
REST = {"up", "down", "norm", "table", "conv", "scale", "places"}


def _rules(*rules):
    named = {name for name in REST if any(repr(name) in rule.text for rule in rules)}
    return {"Attention": [*rules, replicate(*sorted(REST - named))]}


def _layouts(*rules, tp=2):
    plan = plan_of(nn.Sequential(Attention()), policy_of(_rules(*rules)), tp=tp)
    return {p.name.removeprefix("0."): str(p.layout) for p in plan.parameters}, plan


def test_modules_and_bare_parameters():
    layouts, plan = _layouts(by_heads("table", dim=-1), by_heads("scale", "conv", heads="heads"), partial("places"))
    assert layouts["table.weight"] == "split on dim 1"
    assert layouts["scale"] == layouts["conv.weight"] == layouts["conv.bias"] == "split on dim 0"
    assert layouts["places"] == "replicated, gradient summed"
    (groups,) = [step for step in plan.steps if isinstance(step, SetAttribute)]
    assert (groups.path, groups.name, groups.value) == ("0.conv", "groups", 2)
    assert "HeadParameters(dim=-1, names=('weight',))" in str(plan)


def test_too_small_for_every_rank_it_is_replicated_as_its_region_is():
    layouts, _ = _layouts(by_heads("scale"), tp=3)
    assert layouts["scale"] == "replicated"


def test_what_is_inside_of_a_region_needs_a_word():
    rules = {"Attention": [ENTERED, by_heads("scale"), partial("places", "norm", "table"), replicate("conv")]}
    (problem, _) = problems_of(nn.Sequential(Attention()), policy_of(rules))
    assert "conv" in problem
    assert "inside the region" in problem
    right = {"Attention": [ENTERED, by_heads("scale", "conv"), partial("places", "norm", "table")]}
    plan_of(nn.Sequential(Attention()), policy_of(right))
    # A rule for one bare parameter says nothing about the others of the module.
    wrong = {"Attention": [ENTERED, by_heads("scale", "conv"), partial("norm", "table"), replicate("places")]}
    (problem,) = problems_of(nn.Sequential(Attention()), policy_of(wrong))
    assert "0.places" in problem
    assert "its gradient would be this rank's summand" in problem


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (by_heads("norm"), "LayerNorm normalizes over what each rank would have a part of"),
        (by_heads("table"), "dim 0 of an embedding is looked up by index"),
        (by_heads("conv", dim=1), "Conv1d has 4 groups: of each, a rank needs all channels"),
        (by_heads("inner"), "Identity has no parameters of its own"),
        (by_heads("scale", dim=3), "scale (4, 1, 1) has no dim 3"),
        (by_heads("places", heads="odd"), "3 heads (odd) cannot be split over 2 ranks"),
        (by_heads("scale", dim=1, heads="heads"), "scale has 1 entries along dim 1, which are not 4 heads (heads)"),
        (by_heads("places", heads="none"), "Attention has no number 'none'"),
        (by_heads("gone"), "Attention has no submodule 'gone'"),
    ],
    ids=str,
)
def test_refusals(rule, says):
    problems = problems_of(nn.Sequential(Attention()), policy_of(_rules(rule)))
    assert says in problems[0]
    assert not any("covered by no rule" in problem for problem in problems)


def test_optional():
    _layouts(by_heads("gone", optional=True))
