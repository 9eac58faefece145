"""A random search over configurations: every draw has to be equal to the unsharded model, or refused for a reason.

    nox -s fuzz -- --draws 2000
    nox -s fuzz -- --only 1234 --only 77

A draw that fails is one number; ``--only`` repeats it, and it becomes an entry of ``found.py``.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # the workers inherit it

from draws import FAMILIES, Draw
from kinds import KINDS, MIXTURES, draw, numbers
from shardcore_testing import WorkerError, WorkerPool, WorkerTimeout
from trial import Outcome, try_draw

__all__ = ["Found", "families_here", "judged", "main", "search"]

_LIMIT = 120.0  # seconds for one draw, on a machine that is busy


@dataclass(frozen=True)
class Found:
    """What came of one draw."""

    draw: Draw
    outcome: Outcome


def families_here() -> tuple[str, ...]:
    """Return the families whose libraries are installed, in a fixed order."""
    libraries = {"timm": "timm"}
    return tuple(
        f for f in (*FAMILIES, *MIXTURES, "cases") if importlib.util.find_spec(libraries.get(f, "transformers"))
    )


def search(pool: WorkerPool, numbers: Iterable[int], families: Container[str]) -> Iterator[Found]:
    """Carry out draws on the ranks of a pool; those of other families are passed over."""
    for one in map(draw, numbers):
        if one.family in families:
            yield Found(one, judged(pool, one))


def judged(pool: WorkerPool, one: Draw) -> Outcome:
    """Carry out one draw, and return what came of it on all ranks."""
    try:
        outcomes = pool.run(try_draw, one, world=one.ranks, timeout=_LIMIT)
    except (WorkerError, WorkerTimeout) as error:
        return Outcome(state="failed", problems=[f"{type(error).__name__}: {error}"])
    problems = [f"rank {rank}: {what}" for rank, outcome in enumerate(outcomes) for what in outcome.problems]
    states = {outcome.state for outcome in outcomes}
    if len(states) > 1 and "failed" not in states:
        problems.append(f"ranks ended in different states: {sorted(states)}")
    return Outcome(
        state="failed" if len(states) > 1 else states.pop(),
        error=max(outcome.error for outcome in outcomes),
        compared=sum(outcome.compared for outcome in outcomes),
        problems=problems,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Search from the command line; the exit status is 1 if a draw failed, or none was carried out."""
    given = _parser().parse_args(arguments)
    asked = given.only or list(numbers(given.first, given.draws, given.kind or KINDS))
    families = given.family or families_here()
    start, states, worst, failed = time.monotonic(), Counter[str](), 0.0, []
    kinds: dict[str, Counter[str]] = {}
    with WorkerPool(4) as pool:
        for found in search(pool, asked, families):
            states[found.outcome.state] += 1
            kinds.setdefault(found.draw.kind, Counter())[found.outcome.state] += 1
            worst = max(worst, found.outcome.error)
            if found.outcome.state == "failed":
                failed.append(found.draw.number)
                print(f"\nFAILED {found.draw}", *found.outcome.problems[:8], sep="\n    ", flush=True)
            elif given.verbose:
                print(f"{found.outcome.state} {found.outcome.error:.1e} {found.draw}", flush=True)
            _progress(asked.index(found.draw.number) + 1, len(asked), states, start)
            if time.monotonic() - start > 60 * given.minutes:
                break
    print(f"\n{sum(states.values())} draws of {', '.join(families)}: {_counts(states)}; largest difference {worst:.1e}")
    print(*(f"    {kind}: {_counts(counted)}" for kind, counted in kinds.items()), sep="\n")
    if failed:
        print("Repeat them with", *(f"--only {number}" for number in failed))
    return 1 if failed or not states else 0


def _parser() -> argparse.ArgumentParser:
    kind = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="nox -s fuzz --", description=__doc__, formatter_class=kind)
    parser.add_argument("--draws", type=int, default=200, help="how many draws (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="the first draw of each kind (default: %(default)s)")
    parser.add_argument("--only", type=int, action="append", metavar="NUMBER", help="carry out this draw; repeatable")
    parser.add_argument("--kind", choices=KINDS, action="append", help="pass over the others; repeatable")
    parser.add_argument(
        "--family", choices=[*FAMILIES, *MIXTURES, "cases"], action="append", help="pass over the others; repeatable"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so long")
    parser.add_argument("--verbose", action="store_true", help="print every draw")
    return parser


def _counts(states: Counter[str]) -> str:
    return ", ".join(f"{states[name]} {name}" for name in ("equal", "refused", "unsharded", "failed"))


def _progress(count: int, total: int, states: Counter[str], start: float) -> None:
    if sys.stderr.isatty():
        left = (total - count) * (time.monotonic() - start) / count
        print(f"\r{count}/{total}: {_counts(states)}, {left:.0f} s left ", end="", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
