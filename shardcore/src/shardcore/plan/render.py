"""A plan as text: every module that changes, in the order of the model; equal blocks are shown once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from shardcore.nn.layout import ExpertsLayout, ReplicatedLayout
from shardcore.plan.steps import above

if TYPE_CHECKING:
    from shardcore.plan.shard_plan import ParameterPlan, ShardPlan

__all__ = ["heading", "modules", "names_together", "render"]

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def render(plan: ShardPlan) -> str:
    """Return ``plan`` as text."""
    return "\n".join([*heading(plan), *modules(plan)])


def heading(plan: ShardPlan) -> list[str]:
    """Return what is said of the plan as a whole: by which policy it is, and what was decided."""
    ranks = plan.config.tensor_parallel_size or 1
    origin = f" ({plan.origin})" if plan.origin else ""
    head = f"{plan.model.rpartition('.')[2]} by {plan.policy}{origin}, tp {ranks}, digest {plan.digest[:12]}"
    return [head, *map(str, plan.parts), *map(str, plan.choices), *_whole(plan, ranks)]


def modules(plan: ShardPlan) -> Iterator[str]:
    """Yield what becomes of each module: its name, and below it, indented, what is done to it."""
    return _lines(_said(plan, plan.config.tensor_parallel_size or 1))


def _whole(plan: ShardPlan, ranks: int) -> Iterator[str]:
    """Yield what gains nothing by more ranks: lists of blocks of which nothing is split."""
    for name in plan.stages.lists if plan.stages and ranks > 1 else ():
        layouts = [p.layout for p in plan.parameters for known in (p.name, *p.aliases) if known.startswith(f"{name}.")]
        if layouts and all(isinstance(layout, ReplicatedLayout) for layout in layouts):
            yield f"nothing in {name} is split: each of the {ranks} ranks holds and computes all of these blocks"


def _said(plan: ShardPlan, ranks: int) -> dict[str, list[str]]:
    """Return what is said about each module, by its name, in the order of the model."""
    said: dict[str, list[str]] = {}
    for step in plan.steps:
        said.setdefault(step.path, []).append(step.describe())
    for path, mixins in plan.mixins().items():
        if len(mixins) > 1:
            order = " > ".join(mixin.__name__ for mixin in mixins)
            said.setdefault(path, []).append(f"behaves as {order} > the native class")
    for parameter in plan.parameters:
        said.setdefault(parameter.name.rpartition(".")[0], []).append(_parameter(parameter, ranks))
    first = _first_parameters(plan)
    return {path: said[path] for path in sorted(said, key=lambda path: (first.get(path, len(plan.parameters)), path))}


def _first_parameters(plan: ShardPlan) -> dict[str, int]:
    """Return where the first parameter in or below each module stands; a module stands before its children."""
    first: dict[str, int] = {}
    for place, parameter in enumerate(plan.parameters):
        for path in above(parameter.name):
            if path in first:  # and so are all above it
                break
            first[path] = place
    return first


def _parameter(parameter: ParameterPlan, ranks: int) -> str:
    layout, full = parameter.layout, parameter.shape
    splits = isinstance(layout, ExpertsLayout) or (layout is not None and ranks > 1)
    local = layout.shape(full, ranks) if layout and splits else full
    tied = f", tied to {', '.join(parameter.aliases)}" if parameter.aliases else ""
    name = parameter.name.rpartition(".")[2]
    return f"{name} {_shape(full)} -> {_shape(local)}  {layout or 'by user code'}{tied}"


def _shape(shape: Iterable[int]) -> str:
    return f"({', '.join(map(str, shape))})"


def _lines(said: dict[str, list[str]]) -> Iterator[str]:
    alike: dict[tuple[str, ...], list[str]] = {}
    for path, texts in said.items():
        alike.setdefault((_INDEX.sub("*", path), *texts), []).append(path)
    for (pattern, *texts), paths in alike.items():
        yield f"{_together(pattern, paths) or '(the model itself)'}"
        yield from (f"    {text}" for text in texts)


def names_together(paths: Iterable[str]) -> str:
    """Return names of modules in one line, those that differ in one index only together: ``layers.{0-15}, norm``."""
    alike: dict[str, list[str]] = {}
    for path in paths:
        alike.setdefault(_INDEX.sub("*", path), []).append(path)
    return ", ".join(_together(pattern, same) for pattern, same in alike.items())


def _together(pattern: str, paths: list[str]) -> str:
    """Return the common name of modules that differ in one index only, such as ``layers.{0-31}.mlp``."""
    if len(paths) == 1:
        return paths[0]
    if pattern.count("*") != 1:
        return ", ".join(paths)
    found = sorted(int(match.group()) for path in paths if (match := _INDEX.search(path)))
    consecutive = found == list(range(found[0], found[-1] + 1))
    text = f"{found[0]}-{found[-1]}" if consecutive else ",".join(map(str, found))
    return pattern.replace("*", f"{{{text}}}")
