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


@dataclass(slots=True, kw_only=True)
class PipelineStep:
    """One step that is running.

    Attributes:
        parts: the arguments of the micro-batches.
        shares: the part that each of them has in the loss of the batch.
        groups: those of one form together, in their order.
        loss: of an output; None for outputs alone.
        scale: what the loss is multiplied with.
        seed: of what is drawn in it.
        losses: what micro-batches added to the loss, on the last stage.
        outputs: of micro-batches by their numbers, on the last stage, if they are asked for.
    """

    parts: Sequence[Mapping[str, Any]] = ()
    shares: Sequence[float] = ()
    groups: Sequence[MicrobatchGroup] = ()
    loss: Loss | None
    scale: float = 1.0
    seed: int = 0
    losses: list[Tensor] = field(default_factory=list)
    outputs: dict[int, Any] | None = None


def groups_of(traced: Iterable[tuple[str, StageMetadata]]) -> list[MicrobatchGroup]:
    """Return the groups of micro-batches that follow each other.

    Args:
        traced: of each micro-batch, as `StageTracer.forms` returns it.
    """
    groups: list[MicrobatchGroup] = []
    first = 0
    for key, alike in itertools.groupby(traced, lambda one: one[0]):
        metadata = [metadata for _, metadata in alike]
        groups.append(MicrobatchGroup(first=first, count=len(metadata), key=key, metadata=metadata[0]))
        first += len(metadata)
    return groups
