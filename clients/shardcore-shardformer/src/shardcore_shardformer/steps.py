"""Steps that run code of a user: the replacements of Shardformer's descriptions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from shardcore.errors import ConfigError, PartlyShardedError
from shardcore.nn.base import ParallelModule, with_methods
from shardcore.plan.steps.base import ApplyContext, Commit, Options, Step
from shardcore_shardformer.foreign import distribute_local_parameters, local_problem


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceMethods(Step):
    """Methods of this instance are replaced by a user's functions."""

    methods: tuple[tuple[str, Callable[..., Any]], ...]

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        """Return what makes the replacement."""
        return functools.partial(with_methods, ctx.model.get_submodule(self.path), dict(self.methods))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceParameters(Step):
    """A user's function replaces parameters of the module in place."""

    function: Callable[..., Any]

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        """Return what makes the replacement."""
        module, context = ctx.model.get_submodule(self.path), ctx.shared
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters(recurse=False)}

        def commit() -> None:
            try:
                self.function(module, context.group)
            except Exception as error:
                raise PartlyShardedError(
                    f"param_replacement {getattr(self.function, '__qualname__', self.function)} failed at "
                    f"{self.path!r}: {type(error).__name__}: {error}. The model is unusable; build it anew."
                ) from error
            if problem := local_problem(module, shapes, context, recurse=False):
                raise PartlyShardedError(f"param_replacement at {self.path!r}: {problem}. Build the model anew.")
            distribute_local_parameters(module, shapes, context, recurse=False)

        return commit


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceModule(Step):
    """The module is replaced by what a user's `ParallelModule` makes of it."""

    target: type[ParallelModule]
    options: Options = ()

    @override
    def on_split_tokens(self) -> str | None:
        """Return why tokens may not be split around it."""
        return f"{self.target.__name__} would be called with a part of the tokens"

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        """Return what makes the replacement."""
        context = ctx.shared
        native = ctx.model.get_submodule(self.path)
        new = self.target.from_native_module(native, context.group, **dict(self.options))
        shapes = {name: tuple(p.shape) for name, p in native.named_parameters(remove_duplicate=False)}
        if problem := local_problem(new, shapes, context):
            raise ConfigError(f"{self.target.__name__}.from_native_module at {self.path}: {problem}")
        owner, _, name = self.path.rpartition(".")

        def commit() -> None:
            distribute_local_parameters(new, shapes, context)
            setattr(ctx.model.get_submodule(owner), name, new)

        return commit
