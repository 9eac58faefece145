"""The random search over configurations, for a minute; ``nox -s fuzz`` goes on as long as one likes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parent / "fuzz"))

from draws import FAMILIES, Draw, draw
from found import FOUND
from search import families_here, judged, search
from trial import Outcome

#: The draws of every run, and the seconds after which no other is begun.
NUMBERS = range(300)
SECONDS = 45.0
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
@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_stays_right(pool, what):
    outcome = judged(pool, FOUND[what])
    assert outcome.state == "equal", outcome.problems
    assert outcome.compared


def test_numbers_name_draws_whatever_is_installed():
    drawn = [draw(number) for number in range(600)]
    assert drawn == [draw(number) for number in range(600)]
    assert {one.family for one in drawn} == set(FAMILIES)
    assert {one.call for one in drawn} >= {"one", "accumulate", "steps", "generate", "part", "captured", "evaluate"}
    assert {one.ranks for one in drawn} == {2, 3, 4}


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
