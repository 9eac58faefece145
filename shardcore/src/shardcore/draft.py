"""What planning gathers while it goes through the rows of a policy: claims, steps and problems."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardcore.config import ShardConfig
from shardcore.errors import Problem
from shardcore.nn import ColumnLinear, Layout, SwappedModule, VocabEmbedding
from shardcore.policy import HeadCounts, Row
from shardcore.steps import EnterArgument, OpenRegion, ReplaceModule, SetAttribute, SplitTokens, Step, Swap, above

__all__ = ["Claim", "Draft", "DraftScope", "Modules", "report_nested_entries", "report_unentered", "report_unsplit"]

#: Given a native class and the class that would replace it: the class to be used in its place, or None.
Modules = Callable[[type[nn.Module], type[SwappedModule]], type[SwappedModule] | None]


@dataclass
class Claim:
    """A row says how one parameter lies; ``asked`` is the name by which the row reached it."""

    name: str
    row: str
    layout: Layout | None
    asked: str


@dataclass
class Draft:
    """What planning has gathered so far."""

    model: nn.Module
    config: ShardConfig
    ranks: int
    heads: HeadCounts | None = None
    claims: dict[str, list[Claim]] = field(default_factory=dict)  # by the parameter's full name
    heads_failed: bool = False  # a check of heads was reported already
    steps: dict[str, Step] = field(default_factory=dict)  # by their representation: options may be unhashable
    steps_at: dict[str, list[Step]] = field(default_factory=dict)  # the same by path: only those of one path conflict
    paths: dict[int, str] = field(default_factory=dict)  # the first name of each module, by identity
    problems: list[Problem] = field(default_factory=list)
    refusals: list[Problem] = field(default_factory=list)  # if any, the problems of other rows follow from them
    modules: Modules | None = None  # what packs bring in place of parallel modules

    @property
    def carried_out(self) -> list[Step]:
        """The steps that these ranks have a use for: one rank alone splits nothing."""
        return [step for step in self.steps.values() if self.ranks > 1 or not step.splits]


@dataclass
class DraftScope:
    """`shardcore.policy.Scope` for one row and one module."""

    draft: Draft
    row: Row
    path: str
    module: nn.Module

    @property
    def config(self) -> ShardConfig:
        """See `Scope.config`."""
        return self.draft.config

    @property
    def ranks(self) -> int:
        """See `Scope.ranks`."""
        return self.draft.ranks

    @property
    def heads(self) -> HeadCounts | None:
        """See `Scope.heads`."""
        if self.draft.heads is None and not self.draft.heads_failed:
            what = "the row needs the numbers of heads, which the policy does not declare"
            self.problem(what, "add Heads(...) to the policy's checks")
        return self.draft.heads

    def name(self, suffix: str) -> str:
        """See `Scope.name`."""
        name = ".".join(filter(None, (self.path, _dotted(suffix))))
        try:
            # A module under two names is one module: its first name stands for all.
            return self.draft.paths.get(id(self.draft.model.get_submodule(name)), name)
        except AttributeError:
            return name

    def find(self, suffix: str) -> nn.Module | None:
        """See `Scope.find`."""
        try:
            found = self.module.get_submodule(_dotted(suffix))
        except AttributeError:
            if not self.row.optional:
                self.problem(
                    _absence(self.module, suffix),
                    "correct the name for this version of the model, or say optional=True",
                )
            return None
        return found

    def above(self) -> Iterator[tuple[str, nn.Module]]:
        """See `Scope.above`."""
        path = self.path
        while path:
            yield path, self.draft.model.get_submodule(path)
            path = path.rpartition(".")[0]
        yield "", self.draft.model

    def swap(self, suffix: str, target: type[SwappedModule], **options: Any) -> type[SwappedModule]:
        """See `Scope.swap`."""
        module = self.module.get_submodule(_dotted(suffix))
        if self.draft.modules is not None:
            target = self.draft.modules(type(module), target) or target
        if problem := target.refusal(module, self.ranks, **options):
            self.problem(problem, "correct the row, or use another tensor_parallel_size", suffix)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.claim(suffix, name, None)  # said already: not "covered by no row" too
            return target
        self.add(Swap(path=self.name(suffix), target=target, options=tuple(sorted(options.items()))))
        for name, layout in target.layouts(module, self.ranks, **options).items():
            self.claim(suffix, name, layout)
        return target

    def claim(self, suffix: str, parameter: str, layout: Layout | None) -> None:
        """See `Scope.claim`."""
        name = ".".join(filter(None, (self.name(suffix), parameter)))
        claims = self.draft.claims.setdefault(name, [])
        claim = Claim(name, self.row.text, layout, ".".join((self.path, suffix, parameter)))
        # A module under two names may be reached by both, if they say the same.
        if not any(c.layout == layout and (c.asked != claim.asked or c.row == claim.row) for c in claims):
            claims.append(claim)

    def add(self, step: Step) -> None:
        """See `Scope.add`."""
        others = self.draft.steps_at.setdefault(step.path, [])
        for other in others:
            if what := _conflict(step, other):
                self.problem(what, "keep one of them")
        if self.draft.steps.setdefault(repr(step), step) is step:
            others.append(step)

    def problem(self, what: str, todo: str, suffix: str = "") -> None:
        """See `Scope.problem`."""
        problem = Problem(where=self.name(suffix), row=self.row.text, what=what, todo=todo)
        if problem not in self.draft.problems:
            self.draft.problems.append(problem)

    def refuse(self, what: str, todo: str) -> None:
        """See `Scope.refuse`."""
        self.draft.refusals.append(Problem(where=self.name(""), row=self.row.text, what=what, todo=todo))


def _conflict(step: Step, other: Step) -> str | None:
    """Say why two steps at one path cannot both be carried out, or return None."""
    if step == other:
        return None
    if isinstance(step, SetAttribute) and isinstance(other, SetAttribute) and step.name == other.name:
        return f"the attribute {step.path}.{step.name} would be set to {other.value!r} and to {step.value!r}"
    if isinstance(step, OpenRegion) and isinstance(other, OpenRegion):
        if (step.members, step.row) == (other.members, other.row):
            return None  # a shared module, reached from several blocks
        return f"two regions would enter at {step.path}, so its input gradient would be summed twice"
    return None


def report_unentered(draft: Draft) -> None:
    """Report regions in which an argument arrives that nothing above lets in."""
    entered = {step.path for step in draft.steps.values() if isinstance(step, EnterArgument)}
    for step in draft.steps.values():
        if not isinstance(step, OpenRegion) or not step.also or not entered.isdisjoint(above(step.path)):
            continue
        names = ", ".join(repr(name) for name, _ in step.also)
        draft.problems.append(
            Problem(
                where=step.path,
                row=step.describe(),
                what=f"{names} would arrive in the region without having entered it: each rank would have a summand of "
                "its gradient",
                todo="add an enter_arg row for a module above, or name the argument with arg=",
            )
        )


def report_nested_entries(draft: Draft) -> None:
    """Report column linears that enter by themselves inside a module where a region is entered already."""
    entries = {step.path for step in draft.steps.values() if isinstance(step, OpenRegion)}
    for step in draft.steps.values():
        if not (
            isinstance(step, Swap) and issubclass(step.target, ColumnLinear) and dict(step.options).get("enters", True)
        ):
            continue
        inside = [path for path in above(step.path) if path in entries]
        if inside:
            draft.problems.append(
                Problem(
                    where=step.path,
                    row=step.describe(),
                    what=f"it would enter again what entered the region at {inside[0]}: gradients are summed twice",
                    todo="make it one of the region's col=, or move the region's enter",
                )
            )


def report_unsplit(draft: Draft) -> None:
    """Report what cannot work on split tokens, where sequence parallelism is asked for."""
    if not draft.config.enable_sequence_parallelism:
        return
    splits = [step for step in draft.steps.values() if isinstance(step, SplitTokens)]
    if not splits:
        draft.problems.append(
            Problem(
                where="",
                row="ShardConfig.enable_sequence_parallelism=True",
                what="the policy does not say between which modules tokens may be split",
                todo="turn it off, or add a sequence(scatter=..., gather=...) row to the policy",
            )
        )
    members = {path for step in draft.steps.values() if isinstance(step, OpenRegion) for path in step.members}
    places = {place for split in splits for place in split.places}
    for step in draft.steps.values():
        if places.isdisjoint((step.path, *above(step.path))):
            continue
        what = ""
        if isinstance(step, Swap) and issubclass(step.target, ColumnLinear) and step.path not in members:
            what = "it enters by itself, after its module has read the number of tokens"
        elif isinstance(step, Swap) and issubclass(step.target, VocabEmbedding):
            what = "an embedding between split tokens would look up other ids on each rank"
        elif isinstance(step, ReplaceModule):
            what = f"{step.target.__name__} would be called with a part of the tokens"
        if what:
            todo = "declare a region(enter=...) whose entry is the module that reads them, or turn it off"
            draft.problems.append(
                Problem(where=step.path, row=step.describe(), what=f"under sequence parallelism {what}", todo=todo)
            )


def _absence(module: nn.Module, suffix: str) -> str:
    """Say where the way to the submodule ``suffix`` ends, and how it could go on."""
    *parts, last = _dotted(suffix).split(".")
    way = []
    for part in parts:
        if not isinstance(child := getattr(module, part, None), nn.Module):
            last = part
            break
        module = child
        way.append(part)
    owner = f"{type(module).__name__} ({'.'.join(way)})" if way else type(module).__name__
    names = ", ".join(name for name, _ in module.named_children()) or "none"
    return f"{owner} has no submodule {last!r}; its children are {names}"


def _dotted(suffix: str) -> str:
    """Return ``layers[0].mlp``, as Shardformer's policies write it, as ``layers.0.mlp``."""
    return re.sub(r"\[(\d+)\]", r".\1", suffix).lstrip(".")
