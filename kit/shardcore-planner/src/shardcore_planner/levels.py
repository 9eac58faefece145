"""The memory of a rank of a pipeline from action to action: what is there, and what each action takes besides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from shardcore_planner.results import RankEstimate, traffic_of
from shardcore_planner.timeline import Action, in_flight
from shardcore_planner.watch import KINDS, Numbers

_PHASES = {"F": "forward", "B": "backward", "I": "backward", "b": "forward", "f": "backward", "o": "optimizer"}


def rank_estimate(
    rank: int, placed: Sequence[int], order: Sequence[Action], number: int, seen: Numbers, *, trains: bool
) -> RankEstimate:
    """Return what a step takes on a rank.

    Args:
        rank: its position.
        placed: the rank of each stage.
        order: what it does.
        number: of micro-batches.
        seen: what its stages take; see `shardcore_planner.rank_step.run_rank`.
        trains: whether there is a backward.
    """
    stages = tuple(stage for stage, of in enumerate(placed) if of == rank)
    levels = _Levels(seen, stages)
    buffers = levels.buffers(number if trains else 1, trains=trains)
    level = Counter({kind: seen["base", kind] for kind in KINDS})
    level["activations"] += buffers
    level, phase, at_peak = levels.highest(level, order)
    waiting = number if len(stages) > 1 else 1  # in an evaluation, for the next stage of the rank
    flying = in_flight(order) if trains else Counter({-1: waiting})
    return RankEstimate(
        rank=rank,
        stages=stages,
        in_flight=flying[-1],
        held={kind: seen["held", kind] for kind in KINDS[:3]},
        kept=levels.kept,
        buffers=buffers,
        peak=at_peak.total(),
        peak_phase=phase,
        at_peak={kind: at_peak[kind] for kind in KINDS},
        traffic=traffic_of(_sent(seen, stages, placed, number, trains=trains)),
        operations=_by_phase(seen, "operations", number),
        calls=_by_phase(seen, "calls", number),
        device={phase: count / 1e9 for phase, count in _by_phase(seen, "device", number).items()},
    )


def _by_phase(seen: Numbers, what: str, number: int) -> dict[str, int]:
    """Return how much of some work there is in a step, by phase."""
    found: Counter[str] = Counter()
    for key, count in seen.items():
        if key[0] == what:
            found[_PHASES[key[1][0]]] += (number - 1 if key[1][1] == "1" else 1) * count
    return dict(found)


class _Levels:
    """What is alive on a rank while it goes through its actions.

    Args:
        seen: what its stages take.
        stages: their numbers.

    Attributes:
        kept: the most bytes of activations that were in flight.
    """

    def __init__(self, seen: Numbers, stages: tuple[int, ...]) -> None:
        self._seen, self._position = seen, {stage: position for position, stage in enumerate(stages)}
        self._places: dict[str, set[str]] = {}
        for key in seen:
            if key[0] == "rise":
                self._places.setdefault(key[1], set()).add(key[2])
        self.kept = 0

    def buffers(self, number: int, *, trains: bool) -> int:
        """Return the bytes in which stages receive so many micro-batches, forward and backward."""
        ends = ("arrives", "leaves") if trains else ("arrives",)
        return number * sum(self._seen[end, str(p), "bytes"] for p in self._position.values() for end in ends)

    def highest(self, level: Counter[str], order: Sequence[Action]) -> tuple[Counter[str], str, Counter[str]]:
        """Return what is alive in the end, the phase of the peak, and the bytes by kind at the peak."""
        best, when, flying = Counter(level), "forward", 0
        for name, change in _actions(order, self._position):
            for place in self._places.get(name, ()):
                there = Counter({kind: level[kind] + self._seen["rise", name, place, kind] for kind in KINDS})
                if there.total() > best.total():
                    best, when = there, _PHASES[name[0]]
            if change:
                for kind in KINDS:
                    level[kind] += self._seen["change", name, kind]
                flying += self._flown(name)
                self.kept = max(self.kept, flying)
        return level, when, best

    def _flown(self, name: str) -> int:
        """Return how many bytes more an action leaves in flight."""
        forward = self._seen["change", f"F{name[1:]}", "activations"]
        return {"F": forward, "B": -forward}.get(name[0], 0)


def _actions(order: Sequence[Action], position: dict[int, int]) -> Iterator[tuple[str, bool]]:
    """Yield what a rank does, by the names of what was seen, and whether it lasts.

    Of a backward in two halves, the first one takes what a backward takes and leaves all there is to the second one.
    """
    yield "begin", True
    begun: set[tuple[str, int]] = set()
    for action in order:
        kind = "F" if action.kind == "F" else "B"
        number = int((kind, action.stage) in begun)
        if action.kind != "I":
            begun.add((kind, action.stage))
        yield f"{kind}{number} {position[action.stage]}", action.kind != "I"
    yield "finish", True
    yield "optimizer", True


def _sent(seen: Numbers, stages: tuple[int, ...], placed: Sequence[int], number: int, *, trains: bool) -> Numbers:
    """Return what a step sends: the first micro-batch, all further ones, and what is sent once."""
    found: Numbers = Counter()
    for key, size in seen.items():
        if key[0] == "sent":
            _, action, operation, *rest = key
            times = number - 1 if action[1] == "1" else 1
            exchanged = "exchange" if operation == "send" else operation
            found["sent", _PHASES[action[0]], exchanged, *rest] += times * size
    for position, stage in enumerate(stages):
        ways = [("leaves", stage + 1, "forward")] + ([("arrives", stage - 1, "backward")] if trains else [])
        for end, other, phase in ways:
            if 0 <= other < len(placed) and placed[other] != placed[stage]:
                for unit in ("count", "bytes"):
                    found["sent", phase, "send", "pp", "2", unit] += number * seen[end, str(position), unit]
    return found
