"""Words for stages that have heads of different numbers, of which the ranks may divide some."""

from __future__ import annotations

import operator
from dataclasses import dataclass

from torch import nn

from shardcore.policy import Rule, Scope, Word
from shardcore.styles import replicate


@dataclass(frozen=True, slots=True)
class HeadsOfStages:
    """A check that the ranks divide the heads of at least one stage: else all attention would be whole on all of them.

    Attributes:
        heads: the attribute of ``model.config`` with the numbers of heads.
    """

    heads: str

    def problem(self, model: nn.Module, ranks: int) -> tuple[str, str] | None:
        """Return what is wrong and what to do, or None."""
        counts: list[int] = list(getattr(model.config, self.heads))
        if not all(count % ranks for count in counts):
            return None
        what = f"of stages with {', '.join(map(str, counts))} heads ({self.heads}) none can be split over {ranks} ranks"
        return what, "use a tensor_parallel_size that divides the heads of one of them"


def shared(heads: str, *rules: Rule) -> Rule:
    """Say ``rules`` of layers whose heads the ranks divide; elsewhere every rank has all of their attention.

    Args:
        heads: the attribute of a layer that counts its heads.
        *rules: what is split, and the attributes that count it.
    """

    def plan(scope: Scope) -> None:
        divides = operator.attrgetter(heads)(scope.module) % scope.ranks == 0
        for rule in rules if divides else (replicate("attention"),):
            rule.plan(scope)

    return Word(text=f"shared({heads!r}, {', '.join(map(str, rules))})", planned=plan)
