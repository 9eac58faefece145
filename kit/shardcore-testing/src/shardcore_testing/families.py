"""Which cases go through which sections with ``--quick``.

A plan says which kinds of steps, mixins and layouts a model gets: its *signature*. Gradients are compared for each
kind of class of a pack (a base model, each kind of head), each family and each signature; steps, and what else
depends on how kinds work together, once for each signature; and a mechanism, which works or does not whatever it
stands beside, once for each kind of the core that blocks are made of. `shardcore_testing.checks.Section.quick` says
which is which. The first case with a kind stands for it, so a session is quicker where small models come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardcore_testing.cases import Case
from shardcore_testing.subject import Subject, meta_copy

__all__ = ["Chosen", "News", "layouts_of", "mechanisms_of", "quick_size", "signature_of"]


#: Where the core keeps what is around the calls and outputs of a model.
_AROUND = (".outputs", ".calls", ".after_forward")


def signature_of(plan: Any) -> frozenset[str]:
    """Return the names of the kinds of steps, mixins and layouts of a `shardcore.plan.ShardPlan`."""
    return layouts_of(plan) | {kind.__name__ for kind in _kinds(plan)}


def mechanisms_of(plan: Any) -> frozenset[str]:
    """Return the names of those kinds that blocks are made of.

    What is around the calls and outputs of a whole model is in its numbers, and a pack tests its own kinds itself.
    """
    of_blocks = {
        kind.__name__
        for kind in _kinds(plan)
        if kind.__module__.startswith("shardcore.") and not kind.__module__.endswith(_AROUND)
    }
    return layouts_of(plan) | of_blocks


def _kinds(plan: Any) -> set[type]:
    return {type(step) for step in plan.steps} | {mixin for of_path in plan.mixins().values() for mixin in of_path}


def layouts_of(plan: Any) -> frozenset[str]:
    """Return the names of the kinds of layouts of a plan."""
    return frozenset(type(parameter.layout).__name__ for parameter in plan.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a case shows that those before it did not.

    Attributes:
        numbers: a kind of class of its pack, a family, or a signature.
        signature: kinds that no earlier case has together.
        kind: a kind that no earlier case has, of those that blocks are made of.
        layout: a kind of layout that no earlier case has.
    """

    numbers: bool
    signature: bool
    kind: bool
    layout: bool


@dataclass(slots=True)
class Chosen:
    """Asks cases in the order of a session what is new about them; each is built and planned once."""

    _heads: set[tuple[str, str]] = field(default_factory=set)
    _families: set[object] = field(default_factory=set)
    _signatures: set[frozenset[str]] = field(default_factory=set)
    _kinds: set[str] = field(default_factory=set)
    _news: dict[object, dict[str, News]] = field(default_factory=dict)

    def of(self, kit: object, cases: Sequence[Case], plugin: str) -> dict[str, News]:
        """Return what is new about each case of a kit, by its name; asked once, in the order in which kits come."""
        if kit not in self._news:
            self._news[kit] = {case.name: self.news(case, plugin) for case in cases}
        return self._news[kit]

    def news(self, case: Case, plugin: str) -> News:
        """Return what is new about the next case.

        All of a model that cannot be built, or not be planned, is new, so that its tests say why.

        Args:
            case: the case.
            plugin: the module of its pack; ``""`` for what is installed.
        """
        try:
            model = case.build()
            plan = Subject(case=case, tp=quick_size(case), plugin=plugin).plan(meta_copy(model))
        except Exception:
            return News(numbers=True, signature=True, kind=True, layout=True)
        config = getattr(model, "config", model)
        family, head = type(config), (plugin, _head(type(model), type(config)))
        signature, layouts = signature_of(plan), layouts_of(plan)
        new = signature not in self._signatures
        found = News(
            numbers=new or family not in self._families or head not in self._heads,
            signature=new,
            kind=not mechanisms_of(plan) <= self._kinds,
            layout=not layouts <= self._kinds,
        )
        self._heads.add(head)
        self._families.add(family)
        self._signatures.add(signature)
        self._kinds |= signature
        return found


def _head(model: type, config: type) -> str:
    """Return what the name of a class says beside its family's: ``Model``, ``ForCausalLM``, ``Backbone``, ..."""
    return model.__name__.removeprefix(config.__name__.removesuffix("Config"))


def quick_size(case: Case) -> int:
    """Return the number of ranks of a case with ``--quick``: two, or the next that it supports."""
    return min((size for size in case.supports.tensor_parallel if size > 1), default=1)
