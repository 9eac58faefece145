"""Accelerate's schedules of learning rates where the "processes" are replicas, and when their number changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, MultiplicativeLR, SequentialLR

from shardcore.errors import NotSupportedError


class SteppedByReplicas(AcceleratedScheduler):  # type: ignore[misc]  # accelerate is not followed
    """Makes one step for each replica, as Accelerate does for each process: schedules count samples of one."""

    steps: int
    split_batches: bool

    @property
    def times(self) -> int:
        """How many steps it makes with one of the optimizer."""
        return 1 if self.split_batches or not self.step_with_optimizer else self.steps

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Make the steps that belong to one step of the optimizer."""
        times = self.times
        before, self.split_batches = self.split_batches, True  # one step at a time
        try:
            for _ in range(times):
                total = getattr(self.scheduler, "total_steps", None)
                # Not after the end of a schedule that has one, if not all batches were left out at the end.
                if times == 1 or total is None or self.scheduler._step_count <= total:
                    super().step(*args, **kwargs)
        finally:
            self.split_batches = before


def steps_of(schedulers: Sequence[Any]) -> list[int]:
    """Return how many steps each of the prepared ``schedulers`` makes with one of the optimizer."""
    return [scheduler.times if isinstance(scheduler, SteppedByReplicas) else 1 for scheduler in schedulers]


def refuse_unable_to_change(schedulers: Sequence[Any], saved: Sequence[int]) -> None:
    """Refuse a schedule that cannot go on with another number of steps.

    Raises:
        NotSupportedError: it is one of several parts, of which some count in ``saved`` steps and some in those of now.
    """
    for scheduler, steps in _changed(schedulers, saved):
        if isinstance(scheduler.scheduler, SequentialLR | ChainedScheduler) and _has_function(scheduler.scheduler):
            raise NotSupportedError(
                f"the state has a {type(scheduler.scheduler).__name__} that made {steps} steps with one of the "
                f"optimizer, one for each replica, and here it makes {scheduler.times}; its milestones come with the "
                "state and count those, the functions of its LambdaLR count these. Load on as many replicas as the "
                "state was saved on, or write the whole schedule as one LambdaLR"
            )


def made_in_steps_of(schedulers: Sequence[Any], saved: Sequence[int]) -> None:
    """Let ``schedulers``, whose states were loaded, go on from states in which they made ``saved`` steps.

    A function of a `LambdaLR` is not in the state: it counts the steps of now, and so does its scheduler from here on.
    What any other schedule counts (``T_max``, ``milestones``, ...) came with its state, whose steps it goes on making.
    """
    for scheduler, steps in _changed(schedulers, saved):
        native = scheduler.scheduler
        if isinstance(native, LambdaLR | MultiplicativeLR):
            native.last_epoch = round(native.last_epoch * scheduler.times / steps)
            native._step_count = native.last_epoch + 1
        else:
            scheduler.steps = steps


def _changed(schedulers: Sequence[Any], saved: Sequence[int]) -> list[tuple[SteppedByReplicas, int]]:
    """Return those that made other steps when they were saved, with how many."""
    several = [s if isinstance(s, SteppedByReplicas) else None for s in schedulers]
    return [(s, was) for s, was in zip(several, saved, strict=False) if s is not None and s.times != was]


def _has_function(scheduler: Any) -> bool:
    return any(isinstance(part, LambdaLR | MultiplicativeLR) or _has_function(part) for part in _parts(scheduler))


def _parts(scheduler: Any) -> Sequence[Any]:
    return getattr(scheduler, "_schedulers", ())
