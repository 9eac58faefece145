"""Compiling a policy against one model and one configuration. Pure: nothing is changed, meta tensors suffice."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardcore.config import ShardConfig
from shardcore.descriptions import rows_of
from shardcore.errors import PlanError, Problem
from shardcore.nn import ColumnLinear, Layout, SwappedModule
from shardcore.policy import HeadCounts, Heads, ModulePolicy, ModulePolicyDescription, Policy, Row, Stages
from shardcore.rendering import render
from shardcore.steps import OpenRegion, SetAttribute, Step, Swap, to_data

__all__ = ["ParameterPlan", "ShardPlan", "compile_plan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter of the model.

    Attributes:
        name: its first name in the model.
        aliases: further names of the same parameter (tied weights).
        shape: the whole shape.
        dtype: as torch prints it.
        layout: how it lies on ``tp``; None if a user's callable decides.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """A policy compiled against one model and one configuration: pure data, printable, hashable, comparable.

    Attributes:
        model: qualified name of the model's class.
        policy: qualified name of the policy's class.
        origin: the distribution and version that the policy comes from; empty if it was passed by hand.
        config: the configuration it was compiled for.
        parameters: every parameter of the model.
        steps: what is done to the model, in order. Empty at a tensor-parallel size of 1.
        stages: where the model can be cut.
    """

    model: str
    policy: str
    origin: str
    config: ShardConfig
    parameters: tuple[ParameterPlan, ...]
    steps: tuple[Step, ...]
    stages: Stages | None

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON data, the same in every process."""
        data = to_data(self)
        assert isinstance(data, dict)  # a dataclass becomes a dict; narrows the type
        return {**data, "layouts": {p.name: str(p.layout) for p in self.parameters}}

    def __hash__(self) -> int:
        # Values that a policy sets may be unhashable; the digest covers all of them.
        return hash(self.digest)

    @property
    def digest(self) -> str:
        """SHA-256 of the plan, equal for equal plans in every process."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    def render(self) -> str:
        """Return the plan as text: every module that changes, with its parameters; equal blocks are shown once."""
        return render(self)

    def __str__(self) -> str:
        return self.render()


@dataclass
class _Claim:
    name: str
    row: str
    layout: Layout | None
    asked: str  # the name by which the row reached it


@dataclass
class _Draft:
    """What planning has gathered so far."""

    model: nn.Module
    ranks: int
    heads: HeadCounts | None = None
    claims: dict[str, list[_Claim]] = field(default_factory=dict)  # by the parameter's full name
    heads_failed: bool = False  # a check of heads was reported already
    steps: dict[str, Step] = field(default_factory=dict)  # by their representation: options may be unhashable
    paths: dict[int, str] = field(default_factory=dict)  # the first name of each module, by identity
    problems: list[Problem] = field(default_factory=list)


@dataclass
class _Scope:
    """`shardcore.policy.Scope` for one row and one module."""

    draft: _Draft
    row: Row
    path: str
    module: nn.Module

    @property
    def ranks(self) -> int:
        return self.draft.ranks

    @property
    def heads(self) -> HeadCounts | None:
        if self.draft.heads is None and not self.draft.heads_failed:
            what = "the row needs the numbers of heads, which the policy does not declare"
            self.problem(what, "add Heads(...) to the policy's checks")
        return self.draft.heads

    def name(self, suffix: str) -> str:
        name = ".".join(filter(None, (self.path, _dotted(suffix))))
        try:
            # A module under two names is one module: its first name stands for all.
            return self.draft.paths.get(id(self.draft.model.get_submodule(name)), name)
        except AttributeError:
            return name

    def find(self, suffix: str) -> nn.Module | None:
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

    def swap(self, suffix: str, target: type[SwappedModule], **options: Any) -> None:
        module = self.module.get_submodule(_dotted(suffix))
        if problem := target.refusal(module, self.ranks, **options):
            self.problem(problem, "correct the row, or use another tensor_parallel_size", suffix)
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    self.claim(suffix, name, None)  # said already: not "covered by no row" too
            return
        self.add(Swap(path=self.name(suffix), target=target, options=tuple(sorted(options.items()))))
        for name, layout in target.layouts(module, self.ranks, **options).items():
            self.claim(suffix, name, layout)

    def claim(self, suffix: str, parameter: str, layout: Layout | None) -> None:
        name = ".".join(filter(None, (self.name(suffix), parameter)))
        claims = self.draft.claims.setdefault(name, [])
        claim = _Claim(name, self.row.text, layout, ".".join((self.path, suffix, parameter)))
        # A module under two names may be reached by both, if they say the same.
        if not any(c.layout == layout and (c.asked != claim.asked or c.row == claim.row) for c in claims):
            claims.append(claim)

    def add(self, step: Step) -> None:
        for other in self.draft.steps.values():
            if what := _conflict(step, other):
                self.problem(what, "keep one of them")
        self.draft.steps.setdefault(repr(step), step)

    def problem(self, what: str, todo: str, suffix: str = "") -> None:
        problem = Problem(where=self.name(suffix), row=self.row.text, what=what, todo=todo)
        if problem not in self.draft.problems:
            self.draft.problems.append(problem)


def _conflict(step: Step, other: Step) -> str | None:
    """Say why two steps cannot both be carried out, or return None."""
    if step.path != other.path or step == other:
        return None
    if isinstance(step, SetAttribute) and isinstance(other, SetAttribute) and step.name == other.name:
        return f"the attribute {step.path}.{step.name} would be set to {other.value!r} and to {step.value!r}"
    if isinstance(step, OpenRegion) and isinstance(other, OpenRegion):
        if (step.members, step.row) == (other.members, other.row):
            return None  # a shared module, reached from several blocks
        return f"two regions would enter at {step.path}, so its input gradient would be summed twice"
    return None


def _nested_entries(draft: _Draft) -> None:
    """Report column linears that enter by themselves inside a module where a region is entered already."""
    entries = {step.path for step in draft.steps.values() if isinstance(step, OpenRegion)}
    for step in draft.steps.values():
        if not (
            isinstance(step, Swap) and issubclass(step.target, ColumnLinear) and dict(step.options).get("enters", True)
        ):
            continue
        inside = [path for path in entries if step.path.startswith(f"{path}.")]
        if inside:
            draft.problems.append(
                Problem(
                    where=step.path,
                    row=step.describe(),
                    what=f"it would enter again what entered the region at {inside[0]}: gradients are summed twice",
                    todo="make it one of the region's col=, or move the region's enter",
                )
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


def compile_plan(
    policy: Policy | type[Policy], model: nn.Module, config: ShardConfig, *, origin: str = ""
) -> ShardPlan:
    """Compile ``policy`` against ``model``; nothing is changed, and the model may be on the meta device.

    Args:
        policy: a policy or its class.
        model: the unsharded model.
        config: the configuration; a tensor_parallel_size of None counts as 1.
        origin: the distribution and version that the policy comes from.

    Raises:
        PlanError: the policy does not fit; carries every problem.
    """
    policy = policy() if isinstance(policy, type) else policy
    policy.set_model(model)
    ranks = config.tensor_parallel_size or 1
    draft = _Draft(model, ranks)
    row = f"{type(policy).__qualname__}.checks"
    for check in policy.checks:
        if problem := check.problem(model, ranks):
            draft.problems.append(Problem(where="", row=row, what=problem[0], todo=problem[1]))
            draft.heads_failed |= isinstance(check, Heads)
        elif isinstance(check, Heads):
            draft.heads = check.counts(model, ranks)
    draft.paths = {id(module): path for path, module in reversed(list(model.named_modules(remove_duplicate=False)))}
    _plan_rows(draft, policy.module_policy())
    _nested_entries(draft)
    parameters = _parameters(draft)
    if draft.problems:
        raise PlanError(_subject(policy, model, ranks), draft.problems)
    return ShardPlan(
        model=f"{type(model).__module__}.{type(model).__qualname__}",
        policy=f"{type(policy).__module__}.{type(policy).__qualname__}",
        origin=origin,
        config=config,
        parameters=parameters,
        steps=_ordered(list(draft.steps.values())) if ranks > 1 else (),
        stages=policy.stages,
    )


def _subject(policy: Policy, model: nn.Module, ranks: int) -> str:
    return f"{type(policy).__qualname__} does not fit {type(model).__qualname__} at tensor_parallel_size {ranks}"


def _plan_rows(draft: _Draft, module_policy: ModulePolicy) -> None:
    modules = list(draft.model.named_modules())
    for key, value in module_policy.items():
        rows = rows_of(value) if isinstance(value, ModulePolicyDescription) else list(value)
        matching = [(path, module) for path, module in modules if _matches(module, key)]
        name = key if isinstance(key, str) else key.__qualname__
        if not matching and not all(row.optional for row in rows):
            kinds = sorted({type(module).__name__ for _, module in modules})
            draft.problems.append(
                Problem(
                    where="",
                    row=f"{name!r}: [{', '.join(row.text for row in rows)}]",
                    what=f"no module of class {name!r}; the model has {', '.join(kinds)}",
                    todo="correct the class name for this version of the model, or make the rows optional=True",
                )
            )
        for row in rows:
            for path, module in matching:
                row.plan(_Scope(draft, row, path, module))


def _matches(module: nn.Module, key: str | type[nn.Module]) -> bool:
    return any(cls is key or cls.__name__ == key for cls in type(module).__mro__)


def _parameters(draft: _Draft) -> tuple[ParameterPlan, ...]:
    """Account for every parameter: claimed under each of its names, once, with one layout."""
    names: dict[int, list[str]] = {}
    by_id: dict[int, nn.Parameter] = {}
    for name, parameter in draft.model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        by_id[id(parameter)] = parameter
    plans = []
    for key, parameter in by_id.items():
        first, *aliases = names[key]
        places = list(dict.fromkeys(_first_name(draft, name) for name in names[key]))
        # The first claim of each place: more than one is a problem of its own.
        claims = [claim for name in places for claim in draft.claims.get(name, ())[:1]]
        _check_claims(draft, places, claims)
        if draft.ranks > 1 and (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)):
            draft.problems.append(
                Problem(
                    where=first,
                    row="(none)",
                    what="the parameter has gradient hooks, which would stay with the whole tensor that is replaced",
                    todo="register them after shard(), for gradients that are DTensors",
                )
            )
        plans.append(
            ParameterPlan(
                name=first,
                aliases=tuple(aliases),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype),
                layout=claims[0].layout if claims else None,
            )
        )
    return tuple(plans)


def _first_name(draft: _Draft, name: str) -> str:
    """Return the name of a parameter in its module's first place."""
    owner, _, short = name.rpartition(".")
    return ".".join(filter(None, (draft.paths[id(draft.model.get_submodule(owner))], short)))


def _check_claims(draft: _Draft, names: Sequence[str], claims: Sequence[_Claim]) -> None:
    for name in names:
        own = draft.claims.get(name, [])
        if not own:
            draft.problems.append(
                Problem(
                    where=name,
                    row="(none)",
                    what=f"the parameter {tuple(draft.model.get_parameter(name).shape)} is covered by no row",
                    todo="add a row for it: region, vocab, head, norm, or replicate if every rank shall hold it whole",
                )
            )
        elif len(own) > 1:
            rows = " and ".join(claim.row for claim in own)
            draft.problems.append(
                Problem(where=name, row=own[0].row, what=f"the parameter is claimed by {rows}", todo="keep one of them")
            )
    layouts = {str(claim.layout): claim for claim in claims}
    if len(layouts) > 1:
        said = ", ".join(f"{claim.name} is {layout}" for layout, claim in layouts.items())
        draft.problems.append(
            Problem(
                where=names[0],
                row=claims[0].row,
                what=f"tied weights {', '.join(names)} would lie differently: {said}",
                todo="give all names of one parameter the same style",
            )
        )


def _ordered(steps: Sequence[Step]) -> tuple[Step, ...]:
    """Return swaps first: regions are opened between modules that have become parallel."""
    regions: dict[str, Step] = {}
    for step in steps:
        if isinstance(step, OpenRegion):
            regions.setdefault(step.path, step)
    return (
        *(s for s in steps if isinstance(s, Swap)),
        *(s for s in steps if not isinstance(s, Swap | OpenRegion)),
        *regions.values(),
    )
