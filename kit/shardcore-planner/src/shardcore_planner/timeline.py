"""When each rank of a pipeline does what: how much is in flight, and how long ranks wait for each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from shardcore.errors import ConfigError
from shardcore.pipeline.schedules import Schedule
from shardcore_planner.results import Slot
from shardcore_planner.simulation import simulated_ranks

#: What each kind of action takes, if a forward takes 1: a whole backward, and its halves.
_COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}

#: What ends the life of a micro-batch in a stage.
_ENDS = "BW"


@dataclass(frozen=True, slots=True)
class Action:
    """What a rank does next.

    Attributes:
        stage: of which stage.
        kind: ``"F"``, a forward; ``"B"``, a backward; ``"I"`` and ``"W"``, the backward of inputs and of weights.
        micro_batch: of which micro-batch.
    """

    stage: int
    kind: str
    micro_batch: int


Order = list[Action]


def orders(plan: Schedule, ranks: int, chunks: int, number: int) -> list[Order]:
    """Return what each rank does, in its order.

    Of schedules with several stages on a rank these are torch's own lists, for which ranks are simulated.

    Args:
        plan: the schedule.
        ranks: of the pipeline.
        chunks: stages of each rank.
        number: of micro-batches.

    Raises:
        ConfigError: the schedule cannot run so many micro-batches, or the process has a process group.
    """
    if not plan.looped:
        return [list(_of_one_stage(plan, ranks, rank, number)) for rank in range(ranks)]
    count = ranks * chunks
    own = [stage for stage, rank in enumerate(plan.ranks(count, ranks)) if rank == 0]
    with simulated_ranks(ranks):
        stages = [PipelineStage(nn.Identity(), index, count, torch.device("cpu")) for index in own]
        try:
            made = plan.make(stages, number, None)
        except ValueError as error:
            raise _impossible(plan, number, count, str(error)) from error
    return [[action for slot in made.pipeline_order[rank] for action in _flat(slot)] for rank in range(ranks)]


def _of_one_stage(plan: Schedule, ranks: int, rank: int, number: int) -> Iterator[Action]:
    """Yield what a rank with one stage does: some forwards, then a backward and a forward in turns, then backwards."""
    ahead = number
    if plan.name == "Schedule1F1B":
        if number < ranks:
            raise _impossible(plan, number, ranks, "it wants as many micro-batches as stages, or more")
        ahead = ranks - rank
    yield from (Action(rank, "F", micro_batch) for micro_batch in range(ahead))
    for micro_batch in range(number):
        yield Action(rank, "B", micro_batch)
        if micro_batch + ahead < number:
            yield Action(rank, "F", micro_batch + ahead)


def _impossible(plan: Schedule, number: int, stages: int, why: str) -> ConfigError:
    return ConfigError(
        f"{plan.name} of torch cannot run {number} micro-batches through {stages} stages: {why}; use another number of "
        f"micro-batches, such as {2 * stages}"
    )


def _flat(slot: Any) -> Iterator[Action]:
    """Yield the actions of an entry in torch's lists: none, one, or two that it calls overlapped."""
    if slot is None:
        return
    if slot.sub_actions is not None:
        for part in slot.sub_actions:
            yield from _flat(part)
    else:
        yield Action(slot.stage_index, slot.computation_type.value, slot.microbatch_index)


def forwards(plan: Schedule, ranks: int, chunks: int, number: int) -> list[Order]:
    """Return what each rank does in an evaluation: all micro-batches in one of its stages, then in the next one."""
    placed = plan.ranks(ranks * chunks, ranks)
    stages = [[stage for stage, of in enumerate(placed) if of == rank] for rank in range(ranks)]
    return [[Action(stage, "F", n) for stage in own for n in range(number)] for own in stages]


def in_flight(order: Iterable[Action]) -> Counter[int]:
    """Return the most micro-batches that are in flight in each stage of a rank, and under -1 in all of them together.

    A micro-batch is in flight from its forward to the end of its backward.
    """
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for action in order:
        now[action.stage] += (action.kind == "F") - (action.kind in _ENDS)
        most[action.stage] = max(most[action.stage], now[action.stage])
        most[-1] = max(most[-1], now.total())
    return most


def bubble(order: Sequence[Sequence[Action]], costs: Mapping[int, float] | None = None) -> float:
    """Return the fraction of all ranks' time in which they wait.

    A backward takes twice as long as a forward, each of its halves as long; what is sent is there at once.

    Args:
        order: what each rank does.
        costs: of a forward of each stage; all alike if not given.
    """
    found = slots(order, costs)
    busy, last = sum(slot.end - slot.start for slot in found), max((slot.end for slot in found), default=0.0)
    return 1 - busy / (len(order) * last) if busy else 0.0


def slots(order: Sequence[Sequence[Action]], costs: Mapping[int, float] | None = None) -> list[Slot]:
    """Return when each rank does what, as early as it can; arguments as of `bubble`."""
    ends: dict[Action, float] = {}
    found: list[Slot] = []
    free, left = [0.0] * len(order), [list(reversed(actions)) for actions in order]
    stages = max(action.stage for actions in order for action in actions) + 1
    while any(left):
        stuck = True
        for rank, actions in enumerate(left):
            while actions and all(needed in ends for needed in _needed(actions[-1], ends, stages)):
                action = actions.pop()
                start = max([free[rank], *(ends[needed] for needed in _needed(action, ends, stages))])
                takes = _COSTS[action.kind] * (1.0 if costs is None else costs[action.stage])
                ends[action] = free[rank] = start + takes
                found.append(Slot(rank, action.stage, action.kind, action.micro_batch, start, start + takes))
                stuck = False
        if stuck:
            raise ConfigError(f"the ranks wait for each other: nobody can go on with {[a[-1] for a in left if a]}")
    return found


def _needed(action: Action, ends: Mapping[Action, float], stages: int) -> Iterator[Action]:
    """Yield what has to be done before an action, besides what its rank does before it."""
    if action.kind == "F" and action.stage:
        yield Action(action.stage - 1, "F", action.micro_batch)
    elif action.kind in "BI" and action.stage < stages - 1:
        split = Action(action.stage + 1, "I", action.micro_batch)
        yield split if split in ends else Action(action.stage + 1, "B", action.micro_batch)
