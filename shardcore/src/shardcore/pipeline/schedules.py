"""The schedules of torch by their names, on which rank each of their stages lies, and forwards alone on any of them.

torch's own ``schedule.eval`` runs neither stages that lie in a V nor fewer micro-batches than the training needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, pipelining

from shardcore.pipeline.metadata import StageMetadata, filled
from shardcore.pipeline.stage import Stage

#: Runs a stage for the micro-batch of a number and what arrived; returns what leaves it.
RunStage: TypeAlias = Callable[[Stage, StageMetadata, int, list[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A schedule: the class ``name`` of `torch.distributed.pipelining`."""

    name: str
    looped: bool = False  # each rank has several stages
    turns: bool = False  # of two stages of each rank, the second ones come in the reverse order (a V)
    splits: bool = False  # backwards of inputs and of weights are separate

    def ranks(self, stages: int, ranks: int) -> list[int]:
        """Return the rank of each stage."""
        if self.turns:
            return [min(stage, stages - 1 - stage) for stage in range(stages)]
        return [stage % ranks for stage in range(stages)]

    def make(self, stages: list[Any], number: int, loss: Any) -> Any:
        """Return the schedule of this rank's ``stages`` for a number of micro-batches."""
        kind = getattr(pipelining, self.name)
        return kind(stages if self.looped else stages[0], number, loss_fn=loss, scale_grads=False)


#: By the name that users give.
SCHEDULES = {
    "gpipe": Schedule("ScheduleGPipe"),
    "1f1b": Schedule("Schedule1F1B"),
    "interleaved": Schedule("ScheduleInterleaved1F1B", looped=True),
    "looped_bfs": Schedule("ScheduleLoopedBFS", looped=True),
    "interleaved_zero_bubble": Schedule("ScheduleInterleavedZeroBubble", looped=True, splits=True),
    "zbv": Schedule("ScheduleZBVZeroBubble", looped=True, turns=True, splits=True),
    "dualpipev": Schedule("ScheduleDualPipeV", looped=True, turns=True, splits=True),
}


def forward_only(
    run: RunStage,
    stages: Sequence[Stage],
    numbers: Sequence[int],
    metadata: StageMetadata,
    *,
    ranks: Sequence[int],
    group: ProcessGroup,
    device: torch.device,
) -> BaseException | None:
    """Run all micro-batches through all stages; a rank has all of them at a stage before it goes to its next one.

    What ranks send and receive at a time is one batch on all of them: NCCL runs what two ranks exchange, in either
    direction, in the order in which each of them asks for it. A rank that fails sends zeros from then on, so that
    nobody waits for it, and its first exception is returned. The ``stages`` are those of this rank, the ``numbers``
    those of the micro-batches; ``ranks`` has the rank of each stage.
    """
    own, failure = {stage.index: stage for stage in stages}, None
    arrived: dict[tuple[int, int], list[Tensor]] = {}
    for running in _turns(ranks, numbers):
        travels: list[dist.P2POp] = []
        for index, number in running:
            after = index + 1
            forms = metadata.sent(after)
            if index in own:
                leaving: Sequence[Tensor] = ()
                if failure is None:
                    try:
                        leaving = run(own[index], metadata, number, arrived.pop((index, number), []))
                    except BaseException as error:
                        failure = error
                if failure is not None:
                    leaving = filled(forms, device, 0)
                if after in own:
                    arrived[after, number] = list(leaving)
                elif after < len(ranks):
                    sent = [tensor.contiguous() for tensor in leaving]
                    travels += [dist.P2POp(dist.isend, t, group=group, group_peer=ranks[after]) for t in sent]
            elif after in own:
                got = arrived[after, number] = [torch.empty_like(form, device=device) for form in forms]
                travels += [dist.P2POp(dist.irecv, t, group=group, group_peer=ranks[index]) for t in got]
        for work in dist.batch_isend_irecv(travels) if travels else ():
            work.wait()
    return failure


def _turns(ranks: Sequence[int], numbers: Sequence[int]) -> Iterator[list[tuple[int, int]]]:
    """Yield what all ranks run at a time, by stage and micro-batch: each its next one, if that was sent before."""
    left = {me: [(n, number) for n, rank in enumerate(ranks) if rank == me for number in numbers] for me in {*ranks}}
    ready = {(0, number) for number in numbers}
    while any(left.values()):
        running = [todo.pop(0) for todo in left.values() if todo and todo[0] in ready]
        ready |= {(stage + 1, number) for stage, number in running}
        yield running
