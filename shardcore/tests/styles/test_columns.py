from __future__ import annotations

import pytest
import torch
from torch import nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import PlanError
from shardcore.nn.layout import ExchangedLayout, ShardedLayout
from shardcore.plan.steps.modules import ByRank, SetAttribute
from shardcore.policy import HeadCounts, Heads, Policy
from shardcore.styles import (
    attribute,
    by_heads,
    local_groups,
    local_kv_heads,
    norm_over_heads,
    outputs,
    per_rank,
    region,
    segments,
)
from shardcore.styles.columns import Order


@pytest.mark.parametrize(
    ("query", "kv", "ranks", "wanted"),
    [
        (8, 2, 2, [(4, (0,)), (4, (1,))]),
        (4, 2, 4, [(1, (0,)), (1, (0,)), (1, (1,)), (1, (1,))]),
        (6, 2, 4, [(2, (0,)), (2, (0, 1)), (1, (1,)), (1, (1,))]),
        (12, 4, 3, [(4, (0, 0, 0, 1)), (4, (1, 2)), (4, (2, 3, 3, 3))]),
        (5, 5, 3, [(2, (0, 1)), (2, (2, 3)), (1, (4,))]),
    ],
)
def test_heads_of_each_rank(query, kv, ranks, wanted):
    """Consecutive query heads, and KV heads that are used equally often: three times and once is one by one."""
    counts = [HeadCounts(query=query, kv=kv, ranks=ranks, rank=rank) for rank in range(ranks)]
    assert [(c.local_query, c.kv_heads) for c in counts] == wanted
    assert [head for c in counts for head in c.query_heads] == list(range(query))
    for c in counts:
        repeated = [head for head in c.kv_heads for _ in range(local_groups(c))]
        assert repeated == [head * kv // query for head in c.query_heads]
        assert local_kv_heads(c) == len(c.kv_heads)


def test_rows_of_each_rank():
    counts = HeadCounts(query=4, kv=2, ranks=2)
    roles = ("query", "key", "value")
    assert Order(roles).rows(16, counts) == (((0, 4), (8, 10), (12, 14)), ((4, 8), (10, 12), (14, 16)))
    assert Order(roles, "group").rows(16, counts) == (((0, 8),), ((8, 16),))
    four = HeadCounts(query=4, kv=2, ranks=4)
    assert Order(roles, "group").rows(8, four)[:2] == (((0, 1), (2, 4)), ((1, 4),))
    assert Order(("key",)).rows(2, HeadCounts(query=3, kv=1, ranks=3)) == (((0, 2),),) * 3
    assert Order(("query",)).rows(6, HeadCounts(query=3, kv=3, ranks=2)) == (((0, 4),), ((4, 6),))


@pytest.mark.parametrize("options", [{"by": "head"}, {"what": ("query", "gate")}, {"what": ("key", "value")}])
def test_roles_that_say_nothing(options):
    with pytest.raises(ValueError, match='roles are "query", "key" and "value"'):
        segments("qkv", **{"what": ("query", "key", "value"), **options})
    with pytest.raises(ValueError, match='by="group"'):
        segments("qkv", 3, by="group")


class Attention(nn.Module):
    def __init__(self, config, fused, width):
        super().__init__()
        self.config, self.heads, self.width, self.scale = config, config.heads, width, 2.0
        self.qkv, self.out = nn.Linear(8, fused), nn.Linear(width, 8)
        self.norm = nn.LayerNorm(width)

    def forward(self, hidden):
        return self.out(self.qkv(hidden))


class Root(nn.Module):
    pass


def _model(heads=6, kv=2, head_dim=4, fused=40, width=24):
    model = Root()
    model.config = type("Config", (), {})()
    model.config.heads, model.config.kv = heads, kv
    model.attention = Attention(model.config, fused, width)
    model.attention.norm = None
    return model


def _plan(*rules, col=None, tp=2, unit="head", model=None, uneven=True, **fields):
    class Described(Policy):
        checks = (Heads("heads", kv="kv", uneven=uneven),)

        def module_policy(self):
            col_ = col or segments("attention.qkv", ("query", "key", "value"))
            return {"Root": [region(enter="attention", col=col_, row="attention.out", unit=unit), *rules]}

    return compile_plan(Described, model or _model(), ShardConfig(tensor_parallel_size=tp, **fields))


def _problems(*rules, **options):
    with pytest.raises(PlanError) as caught:
        _plan(*rules, **options)
    return [problem.what for problem in caught.value.problems]


def test_a_plan_says_what_is_exchanged():
    plan = _plan()
    layouts = {p.name: p.layout for p in plan.parameters}
    assert layouts["attention.qkv.weight"] == layouts["attention.qkv.bias"] == ExchangedLayout(0)
    assert layouts["attention.out.weight"] == ShardedLayout(1), "3 heads are half of 6"
    assert "split on dim 0, exchanged among the ranks for use" in plan.render()
    assert {p.name: p.layout for p in _plan(tp=4).parameters}["attention.out.weight"] == ExchangedLayout(1)


def test_columns_by_heads_may_be_of_any_width():
    plan = _plan(col="attention.qkv", model=_model(fused=42))
    assert {p.name: p.layout for p in plan.parameters}["attention.qkv.weight"] == ShardedLayout(0)
    (what,) = _problems(col="attention.qkv", model=_model(fused=72))
    assert what == "it has out_features 72, attention.out in_features 24: several projections, in what order?"
    _plan(col=segments("attention.qkv", 3, by="head"), model=_model(fused=72))
    (what,) = _problems(col="attention.qkv", model=_model(fused=40))
    assert what == "its 40 output features are not whole heads: the configuration counts 6"
    (what,) = _problems(col="attention.qkv", model=_model(fused=42, width=22))
    assert what == "its 22 input features are not whole heads: the configuration counts 6"


def test_segments_that_do_not_fit():
    (what,) = _problems(model=_model(fused=41))
    assert "its 41 output features are not query, key, value of 6 query and 2 key/value heads" in what
    assert _problems(unit="column") == ["segments that are queries, keys or values are cut between heads"]


def test_numbers_of_heads_by_rank():
    rules = [attribute("attention.heads", per_rank), attribute("attention.width", per_rank)]
    set_ = {s.name: s.value for s in _plan(*rules, tp=4).steps if isinstance(s, SetAttribute)}
    assert set_ == {"heads": ByRank((2, 2, 1, 1)), "width": ByRank((8, 8, 4, 4))}
    set_ = {s.name: s.value for s in _plan(*rules, tp=2).steps if isinstance(s, SetAttribute)}
    assert set_ == {"heads": 3, "width": 12}
    assert repr(ByRank((2, 1))) == "2, 1 by rank"
    rule = attribute("attention.config.heads", per_rank)
    (step,) = [s for s in _plan(rule, tp=4).steps if isinstance(s, SetAttribute)]
    assert (step.path, step.name, step.value) == ("attention", "config.heads", ByRank((2, 2, 1, 1)))


def test_numbers_that_are_not_of_heads():
    model = _model()
    model.attention.other = 8
    (what,) = _problems(attribute("attention.other", per_rank), model=model, tp=4)
    assert what == "Attention.other is 8, which 4 ranks divide, but not the 6 heads"
    (what,) = _problems(attribute("attention.config.absent", per_rank))
    assert "Config (attention.config) has no attribute 'absent'" in what
    (what,) = _problems(attribute("attention.scale", per_rank))
    assert "is a float; per_rank divides a whole number" in what


class Alias:
    """A configuration in which a name stands for another one, as transformers has it."""

    def __getattribute__(self, name):
        return super().__getattribute__("heads" if name == "num_heads" else name)


def test_a_name_that_stands_for_another_is_no_attribute_of_a_view():
    model = _model()
    model.attention.config = Alias()
    model.attention.config.heads = 6
    (what,) = _problems(attribute("attention.config.num_heads", per_rank), model=model, tp=2)
    assert "Alias (attention.config) returns something else for 'num_heads' than what is set there" in what
    rule = attribute("attention.config.heads", per_rank)
    assert [s.value for s in _plan(rule, model=model).steps if isinstance(s, SetAttribute)] == [3]


def test_an_optional_number_may_be_of_another_kind_of_module():
    absent = attribute("attention.absent", per_rank, optional=True)
    assert [s for s in _plan(absent).steps if isinstance(s, SetAttribute)] == []


def test_a_configuration_may_count_the_heads_of_a_parameter():
    model = _model()
    model.attention.places = nn.Parameter(torch.zeros(6))
    rule = by_heads("attention.places", heads="attention.config.heads")
    assert {p.name: p.layout for p in _plan(rule, model=model).parameters}["attention.places"] == ShardedLayout(0)
    what, *_ = _problems(by_heads("attention.places", heads="attention.config.absent"), model=model)
    assert what == "Config has no number 'absent'"


def test_uneven_heads_are_the_policys_to_allow():
    assert _problems(uneven=False, tp=4)[0].endswith("whole heads are needed on each rank")
    assert "6 query heads (heads) cannot be split over 7 ranks: each needs one" in _problems(tp=7)[0]
    model = _model(heads=6, kv=4)
    assert "6 query heads (heads) are not equally many for each of 4 key/value heads (kv)" in _problems(model=model)[0]


def test_entries_of_heads_are_cut_where_the_heads_are_or_refused():
    model = _model()
    model.attention.slopes = nn.Parameter(torch.ones(6))
    (what,) = _problems(by_heads("attention.slopes"), model=model, tp=4)
    assert "slopes has an entry for each of 6 heads" in what
    assert "4 ranks compute 2, 2, 1, 1, but would hold 2, 2, 2, 0" in what
    for tp in (2, 3):
        plan = _plan(by_heads("attention.slopes"), model=model, tp=tp)
        assert {p.name: p.layout for p in plan.parameters}["attention.slopes"] == ShardedLayout(0)


def test_uneven_attentions_are_gathered_by_their_sizes():
    (step,) = [s for s in _plan(outputs(attentions="heads"), tp=4).steps if type(s).__name__ == "GatherOutputs"]
    assert step.dims == (("attentions", 1, (2, 2, 1, 1)),)


def test_norms_over_heads_that_do_not_fit():
    model = _model()
    model.attention.norm = nn.LayerNorm(24)
    assert (
        "LayerNorm has the parameters ['bias', 'weight']"
        in _problems(norm_over_heads("attention.norm", rms="eps"), model=model)[0]
    )
    model.attention.norm = nn.RMSNorm(22)
    (what,) = _problems(norm_over_heads("attention.norm", rms="eps"), model=model)
    assert what == "its 22 features are not whole heads: the configuration counts 6"
    model.attention.norm = nn.RMSNorm(24)
    (what,) = _problems(norm_over_heads("attention.norm", rms="epsilon"), model=model)
    assert what == "RMSNorm has no number 'epsilon', which rms= says is its epsilon"
