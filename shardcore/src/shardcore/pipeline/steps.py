"""One step of a pipeline: a batch in micro-batches, and those of one form together, which are traced once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.nn.copies import meta_copy
from shardcore.pipeline.losses import Loss
from shardcore.pipeline.metadata import StageMetadata
from shardcore.pipeline.microbatches import shapes_of
from shardcore.pipeline.tracing import StageTracer
from shardcore.plan.cut import Cut

__all__ = ["Microbatch", "MicrobatchGroup", "MicrobatchTracer", "PipelineStep", "named"]

_KEPT = 64  # what is known of calls of other shapes: some bytes each


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


class MicrobatchTracer:
    """Groups micro-batches by their forms, and keeps what was traced of each form.

    Args:
        model: the whole model, sharded along ``tp``; what is traced is a copy of it on meta.
        cut: where it is cut.
        device: where it computes.
        dtype: in which it will compute, where FSDP2 will cast.

    Attributes:
        trace: runs the copy.
    """

    def __init__(self, model: nn.Module, cut: Cut, device: torch.device, dtype: torch.dtype | None) -> None:
        copy = meta_copy(model, dtype)
        self._model = model
        self._configs: dict[int, Any] = {}  # by identity
        for module, other in zip(model.modules(), copy.modules(), strict=True):
            if "config" in module.__dict__:  # what is set there later is traced too
                other.__dict__["config"] = self._configs[id(module.config)] = module.config
        self.trace = StageTracer(copy, cut, device, dtype)
        self._known: dict[str, StageMetadata] = {}

    def groups(self, parts: Sequence[Mapping[str, Any]], loss: Loss | None) -> list[MicrobatchGroup]:
        """Return of each micro-batch the group that it is of.

        Args:
            parts: the arguments of micro-batches.
            loss: of an output; None for outputs alone.
        """
        # Of what the configuration says now a forward may do something else.
        values = (value for config in self._configs.values() for value in vars(config).values())
        settings = [value for value in values if isinstance(value, bool | int | float | str | None)]
        keys = [f"{self._model.training} {named(loss)} {settings} {shapes_of(part)}" for part in parts]
        groups = {}
        for key in dict.fromkeys(keys):
            alike = [part for part, other in zip(parts, keys, strict=True) if other == key]
            metadata = self._metadata(key, alike, loss)
            groups[key] = MicrobatchGroup(first=keys.index(key), count=len(alike), key=key, metadata=metadata)
        return [groups[key] for key in keys]

    def _metadata(self, key: str, alike: Sequence[Mapping[str, Any]], loss: Loss | None) -> StageMetadata:
        """Return what is known of micro-batches of one form; tracing needs one that has labels which count."""
        if (known := self._known.get(key)) is not None:
            return known
        for part in alike:
            found = self.trace(part, loss, training=self._model.training)
            if all(reduction.shifted is not None for reduction in found.reductions):
                break
        else:
            return found  # nobody can tell, and none of them counts
        while len(self._known) >= _KEPT:
            del self._known[next(iter(self._known))]
        self._known[key] = found
        return found


def named(loss: Loss | None) -> str:
    """Name a function by its code and what it holds: it may be made anew in each step, and may hold something else."""
    function: Any = loss
    if (code := getattr(function, "__code__", None)) is None:
        return repr(function)
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    plain = (str, int, float, bool, type(None))
    return f"{code} {[value if isinstance(value, plain) else (type(value), id(value)) for value in held]}"
