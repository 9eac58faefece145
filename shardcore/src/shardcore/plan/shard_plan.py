"""A compiled policy: what becomes of every parameter and module of one model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardcore.config import ShardConfig
from shardcore.nn import Layout
from shardcore.plan.choice import Choice
from shardcore.plan.digest import to_data
from shardcore.plan.render import render
from shardcore.plan.stages import Stages
from shardcore.plan.steps import Step

__all__ = ["ParameterPlan", "PartPlan", "ShardPlan"]


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
    """A submodule that another policy serves, because a rule has delegated it.

    Attributes:
        path: its full name in the model.
        model: qualified name of its class.
        policy: qualified name of the policy's class.
        origin: the distribution and version that the policy comes from; empty if the rule gave it.
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
        return render(self)

    def __str__(self) -> str:
        return self.render()
