"""The schedules of torch by their names, and on which rank each of their stages lies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed import pipelining

from shardcore.errors import ConfigError

__all__ = ["SCHEDULES", "Plan", "schedule_named"]


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


def schedule_named(name: str, chunks: int | None) -> tuple[Plan, int]:
    """Return a schedule and how many stages each rank has.

    Raises:
        ConfigError: it does not have so many stages on a rank.
    """
    plan = SCHEDULES[name]
    usual = 2 if plan.looped else 1
    chunks = usual if chunks is None else chunks
    if (plan.turns and chunks != 2) or (not plan.looped and chunks != 1):
        raise ConfigError(
            f"pipeline_schedule={name!r} has {usual} stages on each rank, got num_model_chunks={chunks}; leave it None"
        )
    return plan, chunks
