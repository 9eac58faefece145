"""One step of a pipeline: a batch in micro-batches, and those of one form together."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardcore.pipeline.losses import Loss
from shardcore.pipeline.metadata import StageMetadata


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicrobatchGroup:
    """Micro-batches of one form, which a schedule runs: its stages say beforehand what they send."""

    first: int  # the number of the first of them in the step
    count: int
    key: str  # names their form
    metadata: StageMetadata

    def numbers(self, count: int) -> list[int]:
        """Return what a schedule of ``count`` micro-batches is fed with: their numbers, then those of fillers.

        A schedule may need more of them than there are. A filler is a micro-batch once more, without a share in the
        loss; its number is that one's complement.
        """
        return [*range(self.first, self.first + self.count), *[~self.first] * (count - self.count)]


@dataclass(slots=True, kw_only=True)
class PipelineStep:
    """One step that is running."""

    parts: Sequence[Mapping[str, Any]] = ()  # the arguments of the micro-batches
    shares: Sequence[float] = ()  # the part that each of them has in the loss of the batch
    groups: Sequence[MicrobatchGroup] = ()  # those of one form together, in their order
    loss: Loss | None  # of an output; None for outputs alone
    scale: float = 1.0  # what the loss is multiplied with
    seed: int = 0  # of what is drawn in it
    losses: list[Tensor] = field(default_factory=list)  # what micro-batches added to the loss, on the last stage
    outputs: dict[int, Any] | None = None  # by number of micro-batch, on the last stage, if they are asked for


def groups_of(traced: Iterable[tuple[str, StageMetadata]]) -> list[MicrobatchGroup]:
    """Return the groups of micro-batches that follow each other, by what `StageTracer.forms` returns of each."""
    groups: list[MicrobatchGroup] = []
    first = 0
    for key, alike in itertools.groupby(traced, lambda one: one[0]):
        metadata = [metadata for _, metadata in alike]
        groups.append(MicrobatchGroup(first=first, count=len(metadata), key=key, metadata=metadata[0]))
        first += len(metadata)
    return groups
