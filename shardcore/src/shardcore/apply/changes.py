"""Carrying out the steps of a plan in two halves: prepare everything that can fail, then change the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from torch import nn

from shardcore.mesh.context import ShardContext
from shardcore.nn.layout import ExpertsLayout, GroupShardedLayout, Layout, Specs, distribute
from shardcore.plan import ShardPlan
from shardcore.plan.steps.base import ApplyContext, Commit


def prepared(model: nn.Module, plan: ShardPlan, context: ShardContext | None) -> list[Commit]:
    """Prepare everything that ``plan`` does to ``model``; called in their order, what is returned changes the model.

    Without a context no parameter changes and no step of the plan splits; with one tensor-parallel rank, none but
    those of whole experts.
    """
    commits: list[Commit] = []
    if context is not None and context.size == 1:
        spread = {p.name: p.layout for p in plan.parameters if isinstance(p.layout, ExpertsLayout)}
        commits.append(functools.partial(_assign, list(_parts(model, spread, context))))
    elif context is not None:
        sizes = {p.layout.group_size for p in plan.parameters if isinstance(p.layout, GroupShardedLayout)}
        for group_size in sorted(sizes):
            context.join_neighbours(group_size)  # before anything that can fail on one rank alone
        layouts = {name: p.layout for p in plan.parameters if p.layout for name in (p.name, *p.aliases)}
        commits.append(functools.partial(_assign, list(_parts(model, layouts, context))))
        commits.append(functools.partial(_move_buffers, model, context))
    ctx = ApplyContext(model, plan.steps, context)
    return commits + [step.prepare(ctx) for step in plan.steps]


def _parts(
    model: nn.Module, layouts: Mapping[str, Layout], context: ShardContext
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (owner, name, new parameter) for every place of every parameter; tied places share one object."""
    made: dict[int, nn.Parameter] = {}
    specs: Specs = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            layout = layouts.get(f"{path}.{name}" if path else name)
            if parameter is None or layout is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = distribute(parameter, layout, context, specs)
            yield module, name, made[id(parameter)]


def _assign(parts: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    while parts:  # popped, so that each whole tensor is freed as soon as its part has taken its place
        module, name, parameter = parts.pop()
        module._parameters[name] = parameter


def _move_buffers(model: nn.Module, context: ShardContext) -> None:
    """Bring buffers to the device of the mesh, where the parts of the parameters are by now."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", context.tp.device_type):
                module._buffers[name] = buffer.to(context.device)
