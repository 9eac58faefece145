"""The schedules of torch by their names, and on which rank each of their stages lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import pipelining

__all__ = ["SCHEDULES", "Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
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
    "gpipe": Plan("ScheduleGPipe"),
    "1f1b": Plan("Schedule1F1B"),
    "interleaved": Plan("ScheduleInterleaved1F1B", looped=True),
    "looped_bfs": Plan("ScheduleLoopedBFS", looped=True),
    "interleaved_zero_bubble": Plan("ScheduleInterleavedZeroBubble", looped=True, splits=True),
    "zbv": Plan("ScheduleZBVZeroBubble", looped=True, turns=True, splits=True),
    "dualpipev": Plan("ScheduleDualPipeV", looped=True, turns=True, splits=True),
}
