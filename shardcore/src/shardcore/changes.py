"""Carrying out the steps of a plan, in two halves: prepare what can fail, then change what cannot.

To teach the sharder a new kind of step, register a `prepare` for it, or a `prepare_locally` if it splits nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from torch import nn

from shardcore.adoption import adopt_local_parameters, local_problem
from shardcore.errors import ConfigError, PartlyShardedError
from shardcore.mesh import ShardContext
from shardcore.nn import (
    CalledByMethods,
    ColumnLinear,
    Compiled,
    FusedRMSNorm,
    GathersOutputs,
    Layout,
    Recomputed,
    Region,
    Replicated,
    RowLinear,
    SoleRegion,
    SplitsLogits,
    SwappedModule,
    TakesLoss,
    TokenBlock,
    TokenEnd,
    TokenSplit,
    TokenStack,
)
from shardcore.nn.base import with_methods
from shardcore.nn.dropout import DropoutSites
from shardcore.nn.entered_argument import EnteredArgument
from shardcore.nn.layout import SharedSplit, distribute
from shardcore.plan import ShardPlan
from shardcore.steps import (
    CallByMethods,
    Compile,
    EnterArgument,
    FreezeForInference,
    FuseNorm,
    GatherOutputs,
    OpenRegion,
    Recompute,
    ReplaceMethods,
    ReplaceModule,
    ReplaceParameters,
    SetAttribute,
    SplitLogits,
    SplitTokens,
    Step,
    Swap,
    TakeLoss,
)

__all__ = ["Changes", "prepare", "prepare_locally"]

Commit = Callable[[], None]


@dataclass
class Changes:
    """The prepared changes of a plan; committing them in order changes the model."""

    commits: list[Commit] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module, plan: ShardPlan, context: ShardContext | None) -> Self:
        """Prepare everything that ``plan`` does to ``model``; the model is not changed.

        Without a context, or with one tensor-parallel rank, no parameter changes and no step of the plan splits.
        """
        commits: list[Commit] = []
        if context is not None and context.size > 1:
            for copies in sorted({p.layout.copies for p in plan.parameters if isinstance(p.layout, SharedSplit)}):
                context.join_neighbours(copies)  # before anything that can fail on one rank alone
            layouts = {name: p.layout for p in plan.parameters if p.layout for name in (p.name, *p.aliases)}
            commits.append(functools.partial(_assign, list(_parts(model, layouts, context))))
            commits.append(functools.partial(_move_buffers, model, context))
        for step in plan.steps:
            commits.append(prepare_locally(step, model) if context is None else prepare(step, model, context))
        return cls(commits)

    def commit(self) -> None:
        """Change the model."""
        for commit in self.commits:
            commit()


def _parts(
    model: nn.Module, layouts: dict[str, Layout], context: ShardContext
) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield (owner, name, new parameter) for every place of every parameter; tied places share one object."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            layout = layouts.get(f"{path}.{name}" if path else name)
            if parameter is None or layout is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = distribute(parameter, layout, context)
            yield module, name, made[id(parameter)]


def _assign(parts: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    while parts:  # popped, so that each whole tensor is freed as soon as its part has taken its place
        module, name, parameter = parts.pop()
        module._parameters[name] = parameter


def _adopt(target: type[SwappedModule], module: nn.Module, context: ShardContext, options: dict[str, Any]) -> None:
    target.adopt(module, context, **options)


def _move_buffers(model: nn.Module, context: ShardContext) -> None:
    """Bring buffers to the device of the mesh, where the parts of the parameters are by now."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device.type not in ("meta", context.tp.device_type):
                module._buffers[name] = buffer.to(context.device)


@functools.singledispatch
def prepare(step: Step, model: nn.Module, context: ShardContext) -> Commit:
    """Do everything about ``step`` that can fail, and return the call that changes the model."""
    return prepare_locally(step, model)


@functools.singledispatch
def prepare_locally(step: Step, model: nn.Module) -> Commit:
    """Do what `prepare` does, for a step that splits nothing and so needs no other rank."""
    raise TypeError(f"no way to carry out a step of class {type(step).__name__}")


@prepare_locally.register
def _(step: FuseNorm, model: nn.Module) -> Commit:
    return functools.partial(FusedRMSNorm.fuse, model.get_submodule(step.path), step.eps)


@prepare_locally.register
def _(step: Compile, model: nn.Module) -> Commit:
    return functools.partial(Compiled.compile_block, model.get_submodule(step.path))


@prepare_locally.register
def _(step: Recompute, model: nn.Module) -> Commit:
    return functools.partial(Recomputed.recompute, model.get_submodule(step.path))


@prepare_locally.register
def _(step: FreezeForInference, model: nn.Module) -> Commit:
    def commit() -> None:
        model.get_submodule(step.path).requires_grad_(False).eval()

    return commit


@prepare_locally.register
def _(step: CallByMethods, model: nn.Module) -> Commit:
    return lambda: None  # one rank alone runs on torch's own generators, and holds plain parameters


@prepare.register
def _(step: CallByMethods, model: nn.Module, context: ShardContext) -> Commit:
    module = model.get_submodule(step.path)
    return functools.partial(_adopt, CalledByMethods, module, context, {"methods": step.methods})


@prepare.register
def _(step: Swap, model: nn.Module, context: ShardContext) -> Commit:
    module = model.get_submodule(step.path)
    return functools.partial(_adopt, step.target, module, context, dict(step.options))


@prepare.register
def _(step: SetAttribute, model: nn.Module, context: ShardContext) -> Commit:
    return functools.partial(setattr, model.get_submodule(step.path), step.name, step.value)


@prepare.register
def _(step: GatherOutputs, model: nn.Module, context: ShardContext) -> Commit:
    options = {"dims": step.dims, "by_tokens": step.by_tokens, "places": step.places}
    return functools.partial(_adopt, GathersOutputs, model.get_submodule(step.path), context, options)


@prepare.register
def _(step: ReplaceMethods, model: nn.Module, context: ShardContext) -> Commit:
    return functools.partial(with_methods, model.get_submodule(step.path), dict(step.methods))


@prepare.register
def _(step: OpenRegion, model: nn.Module, context: ShardContext) -> Commit:
    module, block = model.get_submodule(step.path), model.get_submodule(step.block)
    members = [model.get_submodule(name) for name in step.members]
    last = model.get_submodule(step.row) if step.row else None

    def commit() -> None:
        # A linear that enters by itself has no dropout below it; those of its block's functional calls count.
        trees = [] if isinstance(module, ColumnLinear) else [module]
        dropouts = DropoutSites(trees, [block]) if last is not None else None
        columns = [m for m in members if isinstance(m, ColumnLinear)]
        region: Region
        if isinstance(module, ColumnLinear) and members == [module] and module.uses_what_it_holds:
            region = module.opens = SoleRegion(context, module, dropouts)
        else:
            region = Region(context, step.argument, columns, dropouts, step.also)
            module.register_forward_pre_hook(region, with_kwargs=True)
        if isinstance(last, RowLinear):
            last.region = region

    return commit


@prepare.register
def _(step: EnterArgument, model: nn.Module, context: ShardContext) -> Commit:
    module, hook = model.get_submodule(step.path), EnteredArgument(context, step.argument)

    def commit() -> None:
        module.register_forward_pre_hook(hook, with_kwargs=True)

    return commit


@prepare.register
def _(step: SplitTokens, model: nn.Module, context: ShardContext) -> Commit:
    blocks = [model.get_submodule(path) for path in step.blocks]
    stack, end = model.get_submodule(step.path), model.get_submodule(step.end)

    def commit() -> None:
        tokens = TokenSplit(context)
        for path, module in model.named_modules():
            above = not path or f"{step.path}.".startswith(f"{path}.")
            if step.covers(path) or (above and isinstance(module, GathersOutputs)):
                _bind(module, tokens)
        TokenStack.adopt(stack, context, tokens=tokens)
        for block in blocks:
            TokenBlock.adopt(block, context, tokens=tokens, argument=step.argument)
        TokenEnd.adopt(end, context, tokens=tokens)

    return commit


def _bind(module: nn.Module, tokens: TokenSplit) -> None:
    """Let everything at a module that depends on the number of tokens ask ``tokens``."""
    if isinstance(module, RowLinear | Replicated | GathersOutputs):
        module.__dict__["tokens"] = tokens
    if isinstance(module, ColumnLinear) and module.opens is not None:
        module.opens.tokens = tokens
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, Region):
            hook.tokens = tokens


@prepare.register
def _(step: TakeLoss, model: nn.Module, context: ShardContext) -> Commit:
    options = {"function": step.function, "labels": step.labels, "logits": step.logits}
    return functools.partial(_adopt, TakesLoss, model.get_submodule(step.path), context, options)


@prepare.register
def _(step: SplitLogits, model: nn.Module, context: ShardContext) -> Commit:
    heads = [model.get_submodule(path) for path in step.heads]
    options = {"labels": step.labels, "heads": heads, "chunk": step.chunk}
    return functools.partial(_adopt, SplitsLogits, model.get_submodule(step.path), context, options)


@prepare.register
def _(step: ReplaceModule, model: nn.Module, context: ShardContext) -> Commit:
    native = model.get_submodule(step.path)
    new = step.target.from_native_module(native, context.group, **dict(step.options))
    shapes = {name: tuple(p.shape) for name, p in native.named_parameters(remove_duplicate=False)}
    if problem := local_problem(new, shapes, context):
        raise ConfigError(f"{step.target.__name__}.from_native_module at {step.path}: {problem}")
    owner, _, name = step.path.rpartition(".")

    def commit() -> None:
        adopt_local_parameters(new, shapes, context)
        setattr(model.get_submodule(owner), name, new)

    return commit


@prepare.register
def _(step: ReplaceParameters, model: nn.Module, context: ShardContext) -> Commit:
    module = model.get_submodule(step.path)
    shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}

    def commit() -> None:
        try:
            step.function(module, context.group)
        except Exception as error:
            raise PartlyShardedError(
                f"param_replacement {getattr(step.function, '__qualname__', step.function)} failed at {step.path!r}: "
                f"{type(error).__name__}: {error}. The model is unusable; build it anew."
            ) from error
        if problem := local_problem(module, shapes, context, recurse=False):
            raise PartlyShardedError(f"param_replacement at {step.path!r}: {problem}. Build the model anew.")
        adopt_local_parameters(module, shapes, context, recurse=False)

    return commit
