"""The random search over configurations, for a minute; ``nox -s fuzz`` goes on as long as one likes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from compared import Record
from draws import FAMILIES, Draw
from found import FOUND
from kinds import FIRST, KINDS, MIXTURES, draw
from search import families_here, judged, search
from trial import Outcome

#: The draws of every run, and the seconds after which no other is begun.
NUMBERS = range(300)
#: Those of the other kinds, of which one is carried out for each.
OTHERS = {kind: range(FIRST * KINDS.index(kind), FIRST * KINDS.index(kind) + 300) for kind in KINDS[1:]}
SECONDS = 40.0
#: How many are carried out on the slowest machine.
FEWEST = 30


@pytest.mark.filterwarnings("default")  # what libraries say about some draws is said of the unsharded model too
@pytest.mark.timeout(900)
def test_draws_are_equal_or_refused(pool):
    start, bad, count = time.monotonic(), [], 0
    for found in search(pool, NUMBERS, families_here()):
        count += 1
        if found.outcome.state == "failed":
            bad.append("\n    ".join([str(found.draw), *found.outcome.problems[:4]]))
        if time.monotonic() - start > SECONDS and count >= FEWEST:
            break
    assert count >= FEWEST
    assert not bad, "\n".join(bad)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", OTHERS)
def test_a_draw_of_each_other_kind(pool, kind):
    if kind == "adapters":
        pytest.importorskip("peft")
    few = (one for one in map(draw, OTHERS[kind]) if one.ranks == 2 and not (one.refused() or one.may))
    found = next(search(pool, (one.number for one in few), families_here()))
    assert found.outcome.state == "equal", (str(found.draw), *found.outcome.problems[:4])
    assert found.outcome.compared


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_right(pool, what):
    outcome, refused = judged(pool, FOUND[what]), FOUND[what].refused()
    assert outcome.state == ("refused" if refused else "equal"), outcome.problems
    assert outcome.compared or refused


ODD = (float("inf"), float("-inf"), float("nan"))


@pytest.mark.parametrize("odd", ODD)
def test_a_value_that_is_not_finite_hides_nothing(odd):
    def problems(out: list[float], w: float, b: float) -> list[str]:
        records = [
            Record("a call", {"out": torch.tensor(values)}, {"w": torch.tensor([1.0, of_w]), "b": torch.tensor([of_b])})
            for values, of_w, of_b in (([odd, 1.0], odd, 1.0), (out, w, b))
        ]
        outcome = Outcome()
        outcome.compare_records(*records)
        return outcome.problems

    assert not problems([odd, 1.0], odd, 1.0)
    assert len(problems([odd, 2.0], odd, 2.0)) == 2
    for other in (0.0, *(each for each in ODD if each is not odd)):
        assert problems([other, 1.0], odd, 1.0) == ["a call: out: other values that are not finite"]
        assert problems([odd, 1.0], other, 1.0) == ["a call: gradient of w: other values that are not finite"]


def test_numbers_name_draws_whatever_is_installed():
    drawn = [draw(number) for number in range(600)]
    assert drawn == [draw(number) for number in range(600)]
    assert {one.family for one in drawn} == set(FAMILIES)
    assert {one.call for one in drawn} >= {"one", "accumulate", "steps", "generate", "part", "captured", "evaluate"}
    assert {one.ranks for one in drawn} == {2, 3, 4}
    others = {kind: [draw(number) for number in numbers] for kind, numbers in OTHERS.items()}
    assert others == {kind: [draw(number) for number in numbers] for kind, numbers in OTHERS.items()}
    assert all({one.kind for one in drawn} == {kind} for kind, drawn in others.items())
    assert {kind for kind, drawn in others.items() if any(one.odd for one in drawn)} == {*OTHERS} - {
        "pipeline",
        "cases",
    }
    assert {one.family for one in others["experts"]} == set(MIXTURES)
    assert {one.dtype for one in others["experts"]} == {"float32", "float64"}
    assert {one.how["part"] for one in others["parts"]} >= {"model", "bert", "model.language_model", "body"}


def test_a_mistake_fails_a_draw(pool):
    # Another model on the sharded side: every comparison has to notice.
    drawn = map(draw, NUMBERS)
    one = next(d for d in drawn if d.family in families_here() and d.call == "one" and not (d.frozen or d.refused()))
    outcome = pool.run(broken, one, world=one.ranks)[0]
    assert outcome.state == "failed"
    assert any("gradient of" in problem for problem in outcome.problems), outcome.problems


def broken(one: Draw) -> Outcome:
    """Carry out a draw whose sharded model has one weight more than rounding away from the unsharded one's."""
    import torch

    import shardcore
    import trial

    native = shardcore.shard

    def shard(model, **fields):
        with torch.no_grad():
            next(p for p in model.parameters() if p.ndim > 1).mul_(1 + 1e-6)
        return native(model, **fields)

    shardcore.shard = shard
    try:
        return trial.try_draw(one)
    finally:
        shardcore.shard = native


def test_a_draw_that_ends_differently_on_the_ranks_fails(pool, monkeypatch):
    outcomes = [Outcome(), Outcome(state="refused")]
    monkeypatch.setattr(pool, "run", lambda *args, **kwargs: outcomes)
    found = judged(pool, draw(0))
    assert found.state == "failed"
    assert "different states" in found.problems[0]
