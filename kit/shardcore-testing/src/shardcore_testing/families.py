"""What each case of a pack shows that those before it did not, which decides the sections that it goes through.

A plan says which kinds of steps, mixins and layouts a model gets: its *signature*. Numbers depend on everything; what
depends on how kinds work together is shown once for each signature; and a mechanism, which works or does not whatever
it stands beside, once for each kind of the core that blocks are made of. `shardcore_testing.checks.Section.sizes` says
which section asks for what. With ``--quick`` those before a case are those of the session, so that it is quicker where
small models come first; otherwise those of its pack, and each family shows what its policy decides.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shardcore_testing.cases import Case, Supports
from shardcore_testing.subject import Subject, meta_copy

#: Where the core keeps what is around the calls and outputs of a model.
_AROUND = (".outputs", ".calls", ".after_forward")


def signature_of(plan: Any) -> frozenset[str]:
    """Return the names of the kinds of steps, mixins and layouts of a `shardcore.plan.ShardPlan`."""
    return layouts_of(plan) | _ties_of(plan) | {kind.__name__ for kind in _kinds(plan)}


def mechanisms_of(plan: Any) -> frozenset[str]:
    """Return the names of those kinds that blocks are made of.

    What is around the calls and outputs of a whole model is in its numbers, and a pack tests its own kinds itself.
    """
    of_blocks = {
        kind.__name__
        for kind in _kinds(plan)
        if kind.__module__.startswith("shardcore.") and not kind.__module__.endswith(_AROUND)
    }
    return layouts_of(plan) | _ties_of(plan) | of_blocks


def _ties_of(plan: Any) -> frozenset[str]:
    """Return the name of what a plan has where blocks have a parameter in common; empty if none do."""
    lists = plan.stages.lists if plan.stages else ()

    def block(name: str) -> str:
        home = next((home for home in lists if name.startswith(f"{home}.")), "")
        return home and f"{home}.{name.removeprefix(f'{home}.').partition('.')[0]}"

    homes = ({block(name) for name in (p.name, *p.aliases)} for p in plan.parameters)
    return frozenset({"ties of blocks"} if any(len(found) > 1 for found in homes) else ())


def _kinds(plan: Any) -> set[type]:
    return {type(step) for step in plan.steps} | {mixin for of_path in plan.mixins().values() for mixin in of_path}


def layouts_of(plan: Any) -> frozenset[str]:
    """Return the names of the kinds of layouts of a plan."""
    return frozenset(type(parameter.layout).__name__ for parameter in plan.parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a case shows at one size that those before it did not.

    Attributes:
        numbers: a kind of class of its pack, a family, or a signature.
        family: a family, or what no earlier case of it supports.
        signature: kinds that no earlier case has together.
        kind: a kind that no earlier case has, of those that blocks are made of.
        layout: a kind of layout that no earlier case has.
    """

    numbers: bool
    family: bool
    signature: bool
    kind: bool
    layout: bool


@dataclass(slots=True)
class Chosen:
    """Asks cases in their order what is new about them; each is built and planned once for each size.

    Args:
        quick: at the smallest size of several ranks alone, and whatever pack comes next; otherwise at each size, and
            every kit begins anew.
    """

    quick: bool
    _heads: set[tuple[str, str, int]] = field(default_factory=set)
    _families: set[tuple[object, int]] = field(default_factory=set)
    _supported: set[tuple[object, str]] = field(default_factory=set)
    _signatures: set[frozenset[str]] = field(default_factory=set)
    _kinds: set[str] = field(default_factory=set)
    _news: dict[object, dict[str, dict[int, News]]] = field(default_factory=dict)

    def of(self, kit: object, cases: Sequence[Case], plugin: str) -> dict[str, dict[int, News]]:
        """Return what is new about each case of a kit, by its name and size; asked once, in the order of kits."""
        if kit not in self._news:
            if not self.quick:
                for seen in (self._heads, self._families, self._supported, self._signatures, self._kinds):
                    seen.clear()
            self._news[kit] = {case.name: self.news(case, plugin) for case in cases}
        return self._news[kit]

    def news(self, case: Case, plugin: str) -> dict[int, News]:
        """Return what is new about the next case, by size, the smallest first.

        All of a model that cannot be built, or not be planned, is new, so that its tests say why.

        Args:
            case: the case.
            plugin: the module of its pack; ``""`` for what is installed.
        """
        several = sorted(size for size in case.supports.tensor_parallel if size > 1)
        sizes = [quick_size(case)] if self.quick or not several else several
        try:
            model = case.build()
            return {tp: self._of_plan(model, Subject(case=case, tp=tp, plugin=plugin)) for tp in sizes}
        except Exception:
            return dict.fromkeys(sizes, News(numbers=True, family=True, signature=True, kind=True, layout=True))

    def _of_plan(self, model: Any, subject: Subject) -> News:
        plan = subject.plan(meta_copy(model))
        config = getattr(model, "config", model)
        family, head = type(config), (subject.plugin, _head(type(model), type(config)), subject.tp)
        signature, layouts = signature_of(plan), layouts_of(plan)
        new = signature not in self._signatures
        supported = {(family, of) for of in ("", *_supported(subject.case.supports))}
        found = News(
            numbers=new or (family, subject.tp) not in self._families or head not in self._heads,
            family=not supported <= self._supported,
            signature=new,
            kind=not mechanisms_of(plan) <= self._kinds,
            layout=not layouts <= self._kinds,
        )
        self._heads.add(head)
        self._families.add((family, subject.tp))
        self._supported |= supported
        self._signatures.add(signature)
        self._kinds |= signature
        return found


def _supported(supports: Supports) -> list[str]:
    """Return the names of the capabilities, and of the outputs that can be asked for."""
    return [*supports.captured, *(of.name for of in dataclasses.fields(supports) if getattr(supports, of.name) is True)]


def _head(model: type, config: type) -> str:
    """Return what the name of a class says beside its family's: ``Model``, ``ForCausalLM``, ``Backbone``, ..."""
    return model.__name__.removeprefix(config.__name__.removesuffix("Config"))


def quick_size(case: Case) -> int:
    """Return the number of ranks of a case with ``--quick``: two, or the next that it supports."""
    return min((size for size in case.supports.tensor_parallel if size > 1), default=1)
