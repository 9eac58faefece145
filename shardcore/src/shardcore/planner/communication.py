"""The collectives of one training step, read off a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardcore.nn import ColumnLinear, Replicated, RowLinear, VocabEmbedding, VocabHead
from shardcore.nn.layout import SharedSplit, Whole
from shardcore.plan import ShardPlan
from shardcore.steps import EnterArgument, OpenRegion, SplitLogits, SplitTokens, Step, Swap

__all__ = ["Collective", "collectives"]

Phase = Literal["forward", "backward"]
Operation = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a step without recomputation.

    Attributes:
        where: the module that issues it.
        phase: in the forward or in the backward.
        operation: what is done.
        payload: what is sent, in the notation of the docs.
    """

    where: str
    phase: Phase
    operation: Operation
    payload: str


def collectives(plan: ShardPlan) -> list[Collective]:
    """Return the collectives of one forward and backward (under ``inference_only``: of one forward), in plan order.

    Sequences are counted as if long enough to be split.
    """
    counted = _Count(plan)
    found = [c for step in plan.steps for c in counted.of(step)]
    return [c for c in found if c.phase == "forward"] if plan.config.inference_only else found


class _Count:
    """Knows the whole plan while its steps are counted one by one."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._layouts = {name: p.layout for p in plan.parameters for name in (p.name, *p.aliases)}
        self._splits = [step for step in plan.steps if isinstance(step, SplitTokens)]
        self._split_heads = {head for step in plan.steps if isinstance(step, SplitLogits) for head in step.heads}
        self._biased = {name.rpartition(".")[0] for p in plan.parameters for name in (p.name, *p.aliases)
                        if name.endswith(".bias")}  # fmt: skip

    def of(self, step: Step) -> Iterator[Collective]:
        """Yield the collectives of one step."""
        if isinstance(step, OpenRegion):
            yield from self._region(step)
        elif isinstance(step, EnterArgument):
            yield _backward(step, "all_reduce", f"gradient of {step.argument[0]}")
        elif isinstance(step, SplitTokens):
            yield Collective(where=step.end, phase="forward", operation="all_gather", payload="(B, S/tp, H) output")
            yield Collective(
                where=step.blocks[0], phase="backward", operation="all_gather", payload="(B, S/tp, H) gradient"
            )
        elif isinstance(step, SplitLogits):
            for what in ("largest logits", "sums and the labels' logits"):
                yield Collective(where=step.path, phase="forward", operation="all_reduce", payload=f"(B, S) {what}")
        elif isinstance(step, Swap):
            yield from self._swap(step)

    def _region(self, step: OpenRegion) -> Iterator[Collective]:
        if self._is_split(step.path):
            yield _forward(step, "all_gather", "(B, S/tp, H) input")
            if not self._plan.config.sequence_keep_gathered:
                yield _backward(step, "all_gather", "(B, S/tp, H) input, again")
            yield _backward(step, "reduce_scatter", "(B, S, H) input gradient")
        else:
            yield _backward(step, "all_reduce", "(B, S, H) input gradient")
        yield from self._shared(step, step.members)

    def _swap(self, step: Swap) -> Iterator[Collective]:
        options, split = dict(step.options), self._is_split(step.path)
        if issubclass(step.target, RowLinear):
            yield _forward(step, "reduce_scatter" if split else "all_reduce", "(B, S, H) output")
            if split:
                yield _backward(step, "all_gather", "(B, S/tp, H) output gradient")
            if split and step.path in self._biased and self._sums_at_once:
                yield _backward(step, "all_reduce", "gradient of its bias")
        elif issubclass(step.target, VocabEmbedding):
            yield _forward(step, "all_reduce", "(B, S, H) output")
        elif issubclass(step.target, ColumnLinear):
            if options.get("gather_output") and not self._keeps_split(step):
                yield _forward(step, "all_gather", "(B, S, V) output")
            if options.get("enters", True):
                yield _backward(step, "all_reduce", "(B, S, H) input gradient")
                yield from self._shared(step, (step.path,))
        elif issubclass(step.target, Replicated) and (options.get("partial") or split) and self._sums_at_once:
            yield _backward(step, "all_reduce", "its parameters' gradients")

    def _shared(self, step: Step, members: Sequence[str]) -> Iterator[Collective]:
        """Yield the collectives of parameters that several ranks use and none has to itself."""
        layouts = {name: {self._layouts.get(f"{name}.{short}") for short in ("weight", "bias")} for name in members}
        for copies in sorted({x.copies for found in layouts.values() for x in found if isinstance(x, SharedSplit)}):
            names = ", ".join(name for name, found in layouts.items() if SharedSplit(0, copies) in found)
            yield _forward(step, "all_gather", f"parts of {names} among {copies} ranks")
            yield _backward(step, "reduce_scatter", f"gradients of {names} among {copies} ranks")
        summed = [name for name, found in layouts.items() if Whole(partial=True) in found]
        if summed and self._sums_at_once:
            yield _backward(step, "all_reduce", f"gradients of {', '.join(summed)}")

    @property
    def _sums_at_once(self) -> bool:
        return self._plan.config.partial_gradients == "in_backward"

    def _is_split(self, path: str) -> bool:
        return any(step.covers(path) for step in self._splits)

    def _keeps_split(self, step: Swap) -> bool:
        return issubclass(step.target, VocabHead) and step.path in self._split_heads


def _forward(step: Step, operation: Operation, payload: str) -> Collective:
    return Collective(where=step.path, phase="forward", operation=operation, payload=payload)


def _backward(step: Step, operation: Operation, payload: str) -> Collective:
    return Collective(where=step.path, phase="backward", operation=operation, payload=payload)
