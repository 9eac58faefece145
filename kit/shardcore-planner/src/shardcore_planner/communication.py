"""The collectives of one training step, read off a plan."""

from __future__ import annotations

from dataclasses import dataclass

from typing_extensions import override

from shardcore.nn.costs import Collective, Site
from shardcore.nn.layout import GroupShardedLayout, Layout
from shardcore.plan import ShardPlan
from shardcore.plan.steps.base import Step, above

__all__ = ["Collective", "collectives", "gathers_of_heads"]


def collectives(plan: ShardPlan) -> list[Collective]:
    """Return the collectives of one forward and backward (under ``inference_only``: of one forward), in plan order.

    Sequences are counted as if long enough to be split.
    """
    surroundings = _Surroundings.of(plan)
    found = [c for step in plan.steps for c in step.collectives(_Site(step.path, surroundings))]
    return [c for c in found if c.phase == "forward"] if plan.config.inference_only else found


def gathers_of_heads(plan: ShardPlan, block: str) -> int:
    """Return how many collectives a block costs each way for key/value heads of which each rank has a part.

    They are the same for every pack, and are there at some sizes only, so that no case has to count them.
    """
    layouts = {name: p.layout for p in plan.parameters for name in (p.name, *p.aliases)}
    found: set[tuple[str, int]] = set()
    for step in plan.steps:
        if f"{step.path}.".startswith(f"{block}."):
            read = [layouts.get(f"{module}.{own}") for module in step.reads_together for own in ("weight", "bias")]
            found |= {(step.path, part.group_size) for part in read if isinstance(part, GroupShardedLayout)}
    return len(found)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What the places in one plan have in common."""

    layouts: dict[str, Layout | None]
    splits: tuple[Step, ...]
    gathered: frozenset[str]
    split_heads: frozenset[str]
    sums_at_once: bool
    keeps_gathered: bool

    @classmethod
    def of(cls, plan: ShardPlan) -> _Surroundings:
        return cls(
            layouts={name: p.layout for p in plan.parameters for name in (p.name, *p.aliases)},
            splits=tuple(step for step in plan.steps if step.splits_tokens),
            gathered=frozenset(path for step in plan.steps for path in step.gathers_tokens),
            split_heads=frozenset(head for step in plan.steps for head in step.splits_logits),
            sums_at_once=plan.config.partial_gradients == "in_backward",
            keeps_gathered=plan.config.sequence_keep_gathered,
        )


class _Site(Site):
    """A module's place in a plan."""

    def __init__(self, path: str, surroundings: _Surroundings) -> None:
        self.path, self._surroundings = path, surroundings
        gathered = not surroundings.gathered.isdisjoint((path, *above(path)))
        self.split = not gathered and any(step.splits_tokens_of(path) for step in surroundings.splits)
        self.sums_at_once = surroundings.sums_at_once
        self.keeps_gathered = surroundings.keeps_gathered
        self.splits_logits = path in surroundings.split_heads

    @override
    def layout(self, parameter: str) -> Layout | None:
        return self._surroundings.layouts.get(".".join(filter(None, (self.path, parameter))))

    @override
    def member(self, path: str) -> _Site:
        return _Site(path, self._surroundings)
