"""What is in flight, and how long ranks wait, is what is known of each schedule."""

from __future__ import annotations

import pytest

from shardcore.errors import ConfigError
from shardcore.pipeline import SCHEDULES
from shardcore_planner.timeline import Action, bubble, forwards, in_flight, orders


def made(name, ranks, number, chunks=None):
    plan = SCHEDULES[name]
    return orders(plan, ranks, chunks or (2 if plan.looped else 1), number)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "number"), [(2, 4), (3, 6), (4, 8)])
def test_each_micro_batch_goes_through_each_stage_once(name, ranks, number):
    order = made(name, ranks, number)
    plan = SCHEDULES[name]
    stages = ranks * (2 if plan.looped else 1)
    placed = plan.ranks(stages, ranks)
    for rank, actions in enumerate(order):
        assert {action.stage for action in actions} == {stage for stage, of in enumerate(placed) if of == rank}
    done = [(action.stage, action.kind, action.micro_batch) for actions in order for action in actions]
    assert len(done) == len(set(done))
    for stage in range(stages):
        kinds = {n: "".join(sorted(k for s, k, m in done if (s, m) == (stage, n))) for n in range(number)}
        assert set(kinds.values()) <= ({"BF", "FIW"} if plan.splits else {"BF"})
    assert 0 < bubble(order) < 1
    assert all(in_flight(actions)[-1] <= number * len(actions) for actions in order)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("gpipe", [8, 8, 8, 8]),
        ("1f1b", [4, 3, 2, 1]),
        ("interleaved", [11, 9, 7, 5]),  # (chunks - 1) * ranks + 2 * (ranks - rank - 1) + 1
        ("looped_bfs", [16, 16, 16, 16]),
        ("interleaved_zero_bubble", [8, 8, 8, 8]),
        ("zbv", [8, 8, 8, 8]),
        ("dualpipev", [9, 9, 9, 9]),
    ],
)
def test_what_is_in_flight(name, wanted):
    assert [in_flight(actions)[-1] for actions in made(name, 4, 8)] == wanted


def test_what_is_in_flight_in_each_stage():
    first, last = made("interleaved", 2, 4)
    assert in_flight(first) == {-1: 5, 0: 4, 2: 2}
    assert in_flight(last) == {-1: 3, 1: 3, 3: 1}


@pytest.mark.parametrize(("ranks", "number"), [(2, 2), (2, 8), (3, 5), (4, 16)])
def test_bubbles_are_those_of_the_formulas(ranks, number):
    for name in ("gpipe", "1f1b"):
        assert bubble(made(name, ranks, number)) == pytest.approx((ranks - 1) / (number + ranks - 1))
    for chunks in (2, 3):
        rounds = number - number % ranks or ranks
        found = bubble(made("interleaved", ranks, rounds, chunks))
        assert found == pytest.approx((ranks - 1) / (chunks * rounds + ranks - 1))


def test_split_backwards_fill_bubbles():
    plain = bubble(made("interleaved", 4, 8))
    assert all(bubble(made(name, 4, 8)) < plain / 2 for name in ("interleaved_zero_bubble", "zbv", "dualpipev"))


def test_the_busiest_stage_sets_the_pace():
    order = made("1f1b", 2, 8)
    even, uneven = bubble(order, {0: 1.0, 1: 1.0}), bubble(order, {0: 1.0, 1: 3.0})
    assert even == pytest.approx(bubble(order))
    assert uneven == pytest.approx(1 - 8 * 12 / (2 * (8 * 9 + 3)))


def test_evaluations_have_forwards_alone():
    order = forwards(SCHEDULES["zbv"], 2, 2, 3)
    assert [(action.stage, action.micro_batch) for action in order[0]] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (3, 0),
        (3, 1),
        (3, 2),
    ]
    assert {action.kind for actions in order for action in actions} == {"F"}


@pytest.mark.parametrize(("name", "number"), [("1f1b", 3), ("interleaved", 9), ("dualpipev", 7)])
def test_numbers_that_a_schedule_cannot_run(name, number):
    with pytest.raises(ConfigError, match=f"cannot run {number} micro-batches.*use another number"):
        made(name, 4, number)


def test_ranks_that_wait_for_each_other():
    with pytest.raises(ConfigError, match="wait for each other"):
        bubble([[Action(0, "B", 0), Action(0, "F", 0)], [Action(1, "F", 0), Action(1, "B", 0)]])
