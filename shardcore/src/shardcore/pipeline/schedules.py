"""The schedules of torch by their names, on which rank each of their stages lies, and forwards alone on any of them.

torch's own ``schedule.eval`` runs neither stages that lie in a V nor fewer micro-batches than the training needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """A schedule of `torch.distributed.pipelining`.

    Attributes:
        name: its class there.
        looped: each rank has several stages.
        turns: of two stages of each rank, the second ones come in the reverse order (a V).
        splits: backwards of inputs and of weights are separate.
    """

    name: str
    looped: bool = False
    turns: bool = False
    splits: bool = False

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

    A rank that fails sends zeros from then on, so that nobody waits for it.

    Args:
        run: runs a stage.
        stages: of this rank.
        numbers: of the micro-batches.
        metadata: what crosses.
        ranks: the rank of each stage.
        group: the process group of the pipeline.
        device: where tensors arrive.

    Returns:
        The first exception of this rank; None if there was none.
    """
    me, failure, sends = dist.get_rank(group), None, []
    kept: dict[tuple[int, int], list[Tensor]] = {}
    for stage in stages:
        before, after = stage.index - 1, stage.index + 1
        for number in numbers:
            arrived = kept.pop((stage.index, number), [])
            if stage.index and ranks[before] != me:
                arrived = [torch.empty_like(form, device=device) for form in metadata.boundaries[before].values]
                for tensor in arrived:
                    dist.recv(tensor, group=group, group_src=ranks[before])
            leaving: tuple[Tensor, ...] = ()
            if failure is None:
                try:
                    leaving = run(stage, metadata, number, arrived)
                except BaseException as error:
                    failure = error
            if stage.is_last:
                continue
            if failure is not None:
                leaving = filled(metadata.boundaries[stage.index].values, device, 0)
            if ranks[after] == me:
                kept[after, number] = list(leaving)
            else:
                own = [tensor.contiguous() for tensor in leaving]
                sends += [(dist.isend(tensor, group=group, group_dst=ranks[after]), tensor) for tensor in own]
    for work, _ in sends:  # which holds its tensor until it is gone
        if work is not None:
            work.wait()
    return failure
