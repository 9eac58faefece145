"""Which stage holds what: by work, as the user says, and refused where it cannot be."""

from __future__ import annotations

import itertools

import pytest
from tiny import TinyPolicy, build
from torch import nn

from shardcore.errors import ConfigError, NotSupportedError
from shardcore.pipeline import Cut, balanced
from shardcore.plan import Stages


def test_the_busiest_stage_has_the_least_work():
    for work, number, first, last in (
        ([1.0] * 7, 3, 0.0, 0.0),
        ([1.0] * 8, 2, 0.0, 3.0),
        ([5.0, 1.0, 1.0, 1.0, 4.0], 3, 2.0, 0.5),
        ([1.0, 9.0, 1.0, 1.0], 4, 0.0, 0.0),
    ):

        def loads(bounds: tuple[int, ...], work=work, first=first, last=last) -> list[float]:
            own = [sum(work[start:end]) for start, end in itertools.pairwise(bounds)]
            own[0] += first
            own[-1] += last
            return own

        found = balanced(work, number, first=first, last=last)
        inner = itertools.combinations(range(1, len(work)), number - 1)
        every = [loads((0, *cuts, len(work))) for cuts in inner]
        best = min(every, key=lambda own: (max(own), sum(x * x for x in own)))
        assert (max(loads(found)), sum(x * x for x in loads(found))) == (max(best), sum(x * x for x in best))


def test_the_head_counts_and_tables_do_not():
    model = build(layers=6, vocab=97)
    small = Cut.of(model, TinyPolicy.stages, 2)
    large = Cut.of(build(layers=6, vocab=900), TinyPolicy.stages, 2)
    assert small.bounds == (0, 3, 6)
    assert large.bounds[1] > 3  # the last stage has the head to do
    assert small.blocks == tuple(f"model.layers.{number}" for number in range(6))


def test_who_holds_what():
    cut = Cut.of(build(layers=4), TinyPolicy.stages, 3, bounds=(0, 1, 2, 4))
    assert [list(cut.held(stage)) for stage in range(3)] == [[0], [1], [2, 3]]
    assert {name: cut.holder(name) for name in cut.parts()} == {
        "model.layers.0": 0,
        "model.layers.1": 1,
        "model.layers.2": 2,
        "model.layers.3": 2,
        "model.embed": 0,
        "model.positions": 0,
        "model.norm": 2,
        "head": 2,
    }


class Two(nn.Module):
    def __init__(self, lists: int = 2) -> None:
        super().__init__()
        for number in range(lists):
            setattr(self, f"list{number}", nn.ModuleList(nn.Linear(2, 2) for _ in range(2)))
        self.middle = nn.Linear(2, 2)
        self.shared = nn.Linear(2, 2)


@pytest.mark.parametrize(("bounds", "holder"), [((0, 1, 4), 1), ((0, 2, 4), 0), ((0, 3, 4), 0)])
def test_what_is_between_is_held_where_the_block_before_it_is(bounds, holder):
    stages = Stages(blocks=("list0", "list1"), between="middle", everywhere="shared")
    cut = Cut.of(Two(), stages, 2, bounds=bounds)
    assert cut.holder("middle") == holder
    assert cut.holder("shared") is None


@pytest.mark.parametrize(
    ("number", "bounds", "said"),
    [
        (3, None, "cannot fill 3 stages; use a pipeline_parallel_size of at most 2"),
        (2, (0, 2), "wanted 3 growing numbers from 0 to 2"),
        (2, (0, 0, 2), "wanted 3 growing numbers"),
        (2, (0, 1, 3), "wanted 3 growing numbers"),
    ],
)
def test_cuts_that_cannot_be(number, bounds, said):
    with pytest.raises(ConfigError, match=said):
        Cut.of(build(layers=2), TinyPolicy.stages, number, bounds=bounds)


def test_several_gaps():
    stages = Stages(blocks=("list0", "list1", "list2"), between="middle", everywhere="shared")
    with pytest.raises(NotSupportedError, match="between which of them"):
        Cut.of(Two(3), stages, 2)
