"""What no plan may leave: parameters that cannot be sharded, stages that miss some, outputs that nothing gathers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from shardcore.compile.builder import PlanBuilder, absence
from shardcore.errors import Problem
from shardcore.nn import ReplicatedLayout
from shardcore.nn.outputs import CAPTURED
from shardcore.plan import Stages
from shardcore.plan.steps.base import above
from shardcore.plan.steps.outputs import RefuseCaptured
from shardcore.policy import Policy

_MISSING = object()


def check_stages(builder: PlanBuilder, policy: Policy, stages: Stages | None) -> Stages | None:
    """Return ``stages`` of ``policy`` with the names that this model has, and report what does not fit."""
    if stages is None:
        return None
    rule = f"{type(policy).__qualname__}.stages"
    if not isinstance(stages, Stages):
        what = f"stages is a {type(stages).__name__}; wanted a shardcore.Stages or None"
        builder.report(rule=rule, what=what, todo="write stages = Stages(...)")
        return None
    builder.problems += _twice(stages, rule)
    found = []
    optional = stages.mapped(lambda name: name).optional
    for part, name in stages.parts():
        value, problem = _find(builder.model, name, optional=name in optional)
        if problem is None and part == "blocks" and not isinstance(value, nn.ModuleList | nn.Sequential | None):
            what = f"it is a {type(value).__name__}, and no list of blocks"
            problem = what, "name an nn.ModuleList or nn.Sequential in blocks, and anything else in another part"
        if problem is not None:
            what, todo = problem
            builder.report(where=name, rule=f"{rule}.{part}", what=what, todo=todo)
        if isinstance(value, nn.Module) or (part != "blocks" and value is not None):
            found.append(name)
    present = stages.mapped(lambda name: name if name in found else None)
    builder.problems += _loose(builder.model, present, rule)
    return present


def _twice(stages: Stages, rule: str) -> Iterator[Problem]:
    """Yield names that hold what another one holds, and optional ones that are nowhere else."""
    parts: dict[str, str] = {}
    for part, name in stages.parts():
        if name in parts:
            yield Problem(
                where=name, rule=f"{rule}.{part}", what=f"{parts[name]} names it already", todo="keep one of them"
            )
        parts.setdefault(name, part)
    for name, part in parts.items():
        for outer in (outer for outer in reversed([*above(name)]) if outer in parts):
            what = f"it is below {outer!r}, which {parts[outer]} names already"
            yield Problem(where=name, rule=f"{rule}.{part}", what=what, todo=f"name it, or {outer!r}, not both")
    for name in stages.mapped(lambda name: name).optional:
        if name not in parts:
            what = "it may be absent, but no part of the stages names it"
            yield Problem(where=name, rule=f"{rule}.optional", what=what, todo="remove it, or correct the name")


def _find(model: nn.Module, name: str, *, optional: bool) -> tuple[object, tuple[str, str] | None]:
    """Return what ``name`` is in the model, None if the model leaves it out, and what is wrong with it."""
    value: Any = model
    parts = name.split(".")
    for end, part in enumerate(parts, 1):
        leaf = end == len(parts)
        value = getattr(value, part, _MISSING)
        if value is None or (value is _MISSING and optional and leaf):
            return None, None
        if not isinstance(value, nn.Module | Tensor if leaf else nn.Module):
            what = absence(model, name, "submodule or parameter" if leaf else "submodule")
            todo = "correct the name for this version of the model; if some models of the class lack it, name it in "
            return None, (what, todo + "Stages(optional=...) too")
    return value, None


def _loose(model: nn.Module, stages: Stages, rule: str) -> Iterator[Problem]:
    """Yield what no stage holds: a module if nothing in it is held, and otherwise a parameter."""
    names: dict[int, list[str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        shapes[name] = tuple(parameter.shape)
    around = {"", *stages.lists, *(outer for _, name in stages.parts() for outer in above(name))}
    loose: dict[str, list[str]] = {}
    for tied in names.values():
        if not any(map(stages.holder, tied)):
            place = next(outer for outer in (*reversed([*above(tied[0])]), tied[0]) if outer not in around)
            loose.setdefault(place, []).append(tied[0])
    for place, inside in loose.items():
        if place in shapes:
            what = f"the parameter {shapes[place]} is held by no stage"
        else:
            first = ", ".join(name[len(place) + 1 :] for name in inside[:3])
            more = ", ..." if len(inside) > 3 else ""
            what = f"its parameters ({len(inside)}: {first}{more}) are held by no stage"
        todo = "name it in first, blocks, between, last or everywhere"
        yield Problem(where=place, rule=rule, what=what, todo=todo)


def report_tensors(builder: PlanBuilder) -> None:
    """Report parameters that are partly missing, cannot be trained, or have no collectives."""
    if builder.config.ranks == 1:
        return
    parameters = list(builder.model.named_parameters())
    absent = [name for name, parameter in parameters if parameter.is_meta]
    if 0 < len(absent) < len(parameters):
        builder.report(
            where=absent[0],
            what=f"{len(absent)} of the {len(parameters)} parameters are on the meta device, and the others not",
            todo="load or initialise the missing ones before shard(), or build the whole model on the meta device",
        )
    for name, parameter in parameters:
        what = ""
        if parameter.is_inference() and not builder.config.inference_only:
            what = "it was made under torch.inference_mode() and can never be trained"
            todo = "build the model outside of inference mode, or say inference_only=True"
        elif not parameter.is_floating_point() and _needs_numbers(builder, name):
            what = f"a parameter of {parameter.dtype} cannot be split, and its gradient cannot be summed over ranks"
            todo = "say replicate for it, or shard the model before it is quantized"
        if what:
            builder.report(where=name, what=what, todo=todo)


def _needs_numbers(builder: PlanBuilder, name: str) -> bool:
    """Tell whether a parameter is split, or its gradient summed, which complex numbers and integers do not allow."""
    layouts = [claim.layout for claim in builder.claims.get(name, ())]
    return builder.ranks > 1 and any(layout not in (None, ReplicatedLayout()) for layout in layouts)


def refuse_captured(builder: PlanBuilder) -> None:
    """Plan that modules refuse to return what no rule gathers.

    These are the ones whose configuration can ask for it, as far as they are above all blocks.
    """
    tokens = (step.path for step in builder.steps.values() if step.splits_tokens)
    refused: dict[str, dict[str, str]] = defaultdict(dict)
    for name, places in zip(CAPTURED, (builder.attentions, tokens), strict=True):
        gathered = {step.path for step in builder.steps.values() if name in step.gathers_captured}
        for place in places:
            if gathered.isdisjoint((place, *above(place))):
                for path in _asked(builder, place, name):
                    refused[path].setdefault(name, place)
    for path, outputs in refused.items():
        builder.add_late(RefuseCaptured(path=path, outputs=tuple(outputs.items())))


def _asked(builder: PlanBuilder, place: str, name: str) -> Iterator[str]:
    for path in (place, *above(place)):
        module = builder.named[path]
        within = any(part.isdigit() for part in path.split("."))
        if not within and hasattr(getattr(module, "config", None), f"output_{name}"):
            yield builder.paths[id(module)]
