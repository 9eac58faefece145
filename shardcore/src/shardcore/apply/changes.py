"""Carrying out the steps of a plan in two halves: prepare everything that can fail, then change the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

from torch import nn
from typing_extensions import override

from shardcore.mesh.context import ShardContext
from shardcore.nn.context.shard import ContextShard
from shardcore.nn.layout import ExpertsLayout, GroupShardedLayout, Layout, Specs, distribute
from shardcore.nn.sequence.shard import SequenceShard
from shardcore.plan import ShardPlan
from shardcore.plan.steps.base import ApplyContext, Commit, above


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
    ctx = _ApplyContext(model, plan, context)
    return commits + [step.prepare(ctx) for step in plan.steps]


class _ApplyContext(ApplyContext):
    """The ctx for the steps of one plan."""

    def __init__(self, model: nn.Module, plan: ShardPlan, context: ShardContext | None) -> None:
        self.model, self.context = model, context
        self.draws: dict[type[nn.Module], frozenset[str]] = {}
        self.divided: ContextShard | None = None
        # One for each stack of blocks; whatever depends on the number of its tokens is given the same one.
        self._tokens = [(step, SequenceShard(self.shared)) for step in plan.steps if step.splits_tokens]
        self._gathered = {path for step in plan.steps for path in step.gathers_tokens}

    @property
    @override
    def shared(self) -> ShardContext:
        if self.context is None:
            raise RuntimeError("one rank alone was given a plan with steps that split")
        return self.context

    @override
    def tokens_at(self, path: str) -> SequenceShard | None:
        if not self._gathered.isdisjoint((path, *above(path))):
            return None
        return next((tokens for step, tokens in self._tokens[::-1] if step.splits_tokens_of(path)), None)

    @override
    def tokens_below(self, path: str) -> SequenceShard | None:
        found = (t for step, t in self._tokens[::-1] if not path or f"{step.path}.".startswith(f"{path}."))
        return next(found, None) or self.tokens_at(path)


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
