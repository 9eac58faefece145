"""The collectives of one training step, read off a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shardcore.nn import ColumnLinear, Replicated, RowLinear, VocabEmbedding
from shardcore.plan import ShardPlan
from shardcore.steps import EnterArgument, OpenRegion, Swap

__all__ = ["Collective", "collectives"]


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
    phase: Literal["forward", "backward"]
    operation: Literal["all_reduce", "all_gather"]
    payload: str


def collectives(plan: ShardPlan) -> list[Collective]:
    """Return the collectives of one forward and backward (under ``inference_only``: of one forward), in plan order.

    Column linears that enter by themselves are counted once each; at run time those called with the same tensor share
    one.
    """
    swaps = {step.path: step for step in plan.steps if isinstance(step, Swap)}
    found: list[Collective] = []
    for step in plan.steps:
        if isinstance(step, OpenRegion):
            found += _region(step, swaps)
        elif isinstance(step, EnterArgument):
            payload = f"gradient of {step.argument[0]}"
            found.append(Collective(where=step.path, phase="backward", operation="all_reduce", payload=payload))
        elif isinstance(step, Swap):
            found += _swap(step)
    return [c for c in found if c.phase == "forward"] if plan.config.inference_only else found


def _region(step: OpenRegion, swaps: dict[str, Swap]) -> Iterator[Collective]:
    yield Collective(where=step.path, phase="backward", operation="all_reduce", payload="(B, S, H) input gradient")
    shared = [name for name in step.members if dict(swaps[name].options).get("copies", 1) > 1]
    if shared:
        yield Collective(
            where=step.path, phase="backward", operation="all_reduce", payload=f"gradients of {', '.join(shared)}"
        )


def _swap(step: Swap) -> Iterator[Collective]:
    options = dict(step.options)
    if issubclass(step.target, RowLinear) or issubclass(step.target, VocabEmbedding):
        yield Collective(where=step.path, phase="forward", operation="all_reduce", payload="(B, S, H) output")
    elif issubclass(step.target, ColumnLinear):
        if options.get("gather_output"):
            yield Collective(where=step.path, phase="forward", operation="all_gather", payload="(B, S, V) output")
        if options.get("enters", True):
            yield Collective(
                where=step.path, phase="backward", operation="all_reduce", payload="(B, S, H) input gradient"
            )
    elif issubclass(step.target, Replicated) and options.get("partial"):
        yield Collective(where=step.path, phase="backward", operation="all_reduce", payload="its parameters' gradients")
