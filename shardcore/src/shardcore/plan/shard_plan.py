"""A compiled policy: what becomes of every parameter and module of a model; as text, and the phases that carry it out.

As text it names every module that changes, in the order of the model; equal blocks are shown once. `shardcore.api` has
the order of the phases.

```
        begin    check    items   |  all ranks agree  |   shard   |  apply
phase   all      all      all     |                   |   (first) |  one after the other, each on all ranks
```

Nothing is changed before the ranks agree, but what `begin` does, and `give_up` undoes that on every rank.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardcore.config import ShardConfig
from shardcore.mesh.context import ShardContext
from shardcore.nn import Layout
from shardcore.nn.layout import ExpertsLayout, ReplicatedLayout
from shardcore.plan.digest import Choice, to_data
from shardcore.plan.stages import Stages
from shardcore.plan.steps.base import Step, above


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterPlan:
    """One parameter of the model.

    Attributes:
        name: its first name in the model.
        aliases: further names of the same parameter (tied weights).
        shape: the full shape.
        dtype: as torch prints it.
        layout: its layout on ``tp``; None if a user's callable decides.
        held_by: the entries of the policy's stages that contain it (`Stages.holder`), in the order of its names: one,
            or several for a tied weight (the embedding in ``first`` and the head in ``last``). Empty without stages.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Layout | None
    held_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PartPlan:
    """A submodule that another policy serves, because a rule has delegated it; classes are said by qualified names.

    ``origin`` is the distribution and version that the policy comes from; empty if the rule gave it.
    """

    path: str
    model: str
    policy: str
    origin: str

    def __str__(self) -> str:
        origin = f" ({self.origin})" if self.origin else ""
        return f"{self.path}: {self.model.rpartition('.')[2]} by {self.policy}{origin}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """A policy compiled against one model and one configuration: pure data, printable, hashable, comparable.

    Attributes:
        model: qualified name of the model's class.
        policy: qualified name of the policy's class.
        origin: the distribution and version that the policy comes from; empty if it was passed by hand.
        config: the configuration it was compiled for.
        parameters: every parameter of the model.
        steps: what is done to the model, in order. At a tensor-parallel size of 1, only steps that split nothing.
        stages: where the model can be cut, by names that it has.
        choices: how the switches of the configuration that leave a choice were decided.
        parts: the submodules that other policies serve, outer ones first.
    """

    model: str
    policy: str
    origin: str
    config: ShardConfig
    parameters: tuple[ParameterPlan, ...]
    steps: tuple[Step, ...]
    stages: Stages | None
    choices: tuple[Choice, ...] = ()
    parts: tuple[PartPlan, ...] = ()

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

    def mixins(self) -> dict[str, tuple[type[nn.Module], ...]]:
        """Return what the plan makes each module do beyond its native class, outermost first, by its path."""
        found: dict[str, tuple[type[nn.Module], ...]] = {}
        for step in self.steps:
            for path, mixin in step.mixins:
                if mixin not in found.get(path, ()):
                    found[path] = (mixin, *found.get(path, ()))
        return found

    def render(self) -> str:
        """Return the plan as text: every module that changes, with its parameters; equal blocks are shown once."""
        return "\n".join([*heading(self), *modules(self)])

    __str__ = render


_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def heading(plan: ShardPlan) -> list[str]:
    """Return what is said of the plan as a whole: by which policy it is, and what was decided."""
    ranks = plan.config.tensor_parallel_size or 1
    origin = f" ({plan.origin})" if plan.origin else ""
    context = plan.config.context_parallel_size or 1
    sizes = f"tp {ranks}" if context == 1 else f"tp {ranks} x cp {context}"
    head = f"{plan.model.rpartition('.')[2]} by {plan.policy}{origin}, {sizes}, digest {plan.digest[:12]}"
    return [head, *map(str, plan.parts), *map(str, plan.choices), *_whole(plan, ranks)]


def modules(plan: ShardPlan) -> Iterator[str]:
    """Yield what becomes of each module: its name, and below it, indented, what is done to it."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for path, texts in _said(plan, plan.config.tensor_parallel_size or 1).items():
        alike.setdefault((_INDEX.sub("*", path), *texts), []).append(path)
    for (pattern, *texts), paths in alike.items():
        yield _together(pattern, paths) or "(the model itself)"
        yield from (f"    {text}" for text in texts)


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


class ModelPhase:
    """One thing that is done to a model after its layers were sharded. Whether it runs follows from the plan alone."""

    def begin(self) -> None:
        """Make the model ready to be compiled."""

    def give_up(self) -> None:
        """Undo `begin`: nothing was sharded."""

    def check(self, plan: ShardPlan) -> None:
        """Refuse what would fail after the model was changed; an error becomes one on all ranks."""

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield (name, value) of what has to be the same on every rank."""
        yield from ()

    def runs(self, context: ShardContext | None) -> bool:
        """Tell whether there is something to do, alike on all ranks; ``context`` is None where nothing was sharded."""
        return context is not None

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Change the model; what fails on one rank is an error on all, and leaves the model unusable."""
        raise NotImplementedError
