"""One step of a pipeline: a batch in micro-batches, and those of one form together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardcore.pipeline.losses import Loss
from shardcore.pipeline.metadata import StageMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchGroup:
    """Micro-batches of one form, which a schedule runs: its stages say beforehand what they send.

    Attributes:
        first: the number of the first of them in the step.
        count: how many they are.
        key: names their form.
        metadata: what stages return and send for them.
    """

    first: int
    count: int
    key: str
    metadata: StageMetadata

    def numbers(self, count: int) -> list[int]:
        """Return what a schedule of ``count`` micro-batches is fed with: their numbers, then those of fillers.

        A schedule may need more of them than there are. A filler is a micro-batch once more, without a share in the
        loss; its number is that one's complement.
        """
        return [*range(self.first, self.first + self.count), *[~self.first] * (count - self.count)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """One micro-batch.

    Attributes:
        arguments: of the call.
        share: its part in the loss of the batch.
        group: with which it runs.
    """

    arguments: Mapping[str, Any]
    share: float
    group: MicrobatchGroup


@dataclass(slots=True, kw_only=True)
class PipelineStep:
    """One step that is running.

    Attributes:
        feed: the micro-batches.
        loss: of an output; None for outputs alone.
        scale: what the loss is multiplied with.
        seed: of what is drawn in it.
        losses: what micro-batches added to the loss, on the last stage.
        outputs: of micro-batches by their numbers, on the last stage, if they are asked for.
    """

    feed: Sequence[Microbatch]
    loss: Loss | None
    scale: float = 1.0
    seed: int = 0
    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[int, Any] | None = None

    @property
    def groups(self) -> list[MicrobatchGroup]:
        """The groups, in their order."""
        return list(dict.fromkeys(microbatch.group for microbatch in self.feed))

    def __getitem__(self, number: int) -> Microbatch:
        """Return the micro-batch of a number, or the one of which a filler is a copy."""
        return self.feed[number if number >= 0 else ~number]


def groups_of(traced: Sequence[tuple[str, StageMetadata]]) -> list[MicrobatchGroup]:
    """Return of each micro-batch the group that it is of.

    Args:
        traced: of each micro-batch, as `StageTracer.forms` returns it.
    """
    keys = [key for key, _ in traced]
    groups = {
        key: MicrobatchGroup(first=keys.index(key), count=keys.count(key), key=key, metadata=metadata)
        for key, metadata in traced
    }
    return [groups[key] for key in keys]
