"""Steps at single modules: another class, another attribute."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from shardcore.nn.base import ParallelMixin
from shardcore.nn.copies import with_value
from shardcore.nn.costs import Collective, Site
from shardcore.nn.replicated import HeadParameters, Replicated
from shardcore.nn.root import RngScope
from shardcore.plan.digest import to_data
from shardcore.plan.steps.base import ApplyContext, Commit, Options, Phase, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Swap(Step):
    """The module becomes a parallel one."""

    phase: ClassVar[Phase] = Phase.SWAP

    target: type[ParallelMixin]
    options: Options = ()

    @override
    def describe(self) -> str:
        options = ", ".join(f"{name}={value}" for name, value in self.options)
        return f"{self.target.__name__}({options})" if options else self.target.__name__

    @override
    def in_full(self) -> str:
        options = ", ".join(f"{name}={to_data(value)}" for name, value in self.options)
        return f"{self.path or 'the model'} becomes {to_data(self.target)}({options})"

    @property
    @override
    def splits(self) -> bool:
        return self.target.plan_needs_tp

    @property
    @override
    def mixins(self) -> tuple[tuple[str, type[ParallelMixin]], ...]:
        return ((self.path, self.target),)

    @property
    @override
    def splits_heads(self) -> bool:
        return self.enters and not dict(self.options).get("gather_output", False)

    @property
    @override
    def enters(self) -> bool:
        return self.target.plan_enters(**dict(self.options))

    @property
    @override
    def sums_gradients(self) -> bool:
        return self.target.plan_sums_gradients(**dict(self.options))

    @property
    @override
    def gathers_captured(self) -> tuple[str, ...]:
        return self.target.plan_gathers

    @property
    @override
    def fuses(self) -> str | None:
        # A pack brings a norm of its own because it is fused.
        own = self.target in (Replicated, HeadParameters)
        brought = issubclass(self.target, Replicated) and not own and not self.target.holds_parts
        return f"{self.target.__name__} of a pack" if brought else None

    @override
    def on_split_tokens(self) -> str | None:
        return self.target.plan_on_split_tokens(**dict(self.options))

    @override
    def collectives(self, site: Site) -> Iterator[Collective]:
        return self.target.plan_collectives(site, **dict(self.options))

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        module, tokens = ctx.model.get_submodule(self.path), ctx.tokens_at(self.path)
        context: Any = ctx.shared if self.splits else ctx.context

        def commit() -> None:
            self.target.swap_class(module, context, **dict(self.options))._take_sequence(tokens)

        return commit


@dataclass(frozen=True, slots=True)
class ByRank:
    """A value that is not the same on all ranks, by rank."""

    values: tuple[Any, ...]

    @classmethod
    def of(cls, values: Sequence[Any]) -> Any:
        """Return the value that all ranks have, or the values by rank."""
        return values[0] if all(value == values[0] for value in values) else cls(tuple(values))

    def __repr__(self) -> str:
        return f"{', '.join(map(repr, self.values))} by rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAttribute(Step):
    """An attribute gets the value for one rank.

    Attributes:
        name: of the module; or, after a dot, of an object that it holds, of which it gets a view of its own.
        value: what all ranks set, or what each does.
    """

    name: str
    value: Any | ByRank

    @override
    def describe(self) -> str:
        return f"{self.name} = {self.value!r}"

    @override
    def conflict(self, other: Step) -> str | None:
        if isinstance(other, SetAttribute) and self.name == other.name:
            return f"the attribute {self.path}.{self.name} would be set to {other.value!r} and to {self.value!r}"
        return None

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        module, value = ctx.model.get_submodule(self.path), self.value
        if isinstance(value, ByRank):
            value = value.values[ctx.shared.rank]
        holder, _, name = self.name.rpartition(".")
        if not holder:
            return functools.partial(setattr, module, name, value)

        def commit() -> None:
            setattr(module, holder, with_value(getattr(module, holder), name, value))

        return commit


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeRandomness(Step):
    """The module, which is often called without the model around it, runs on the model's random stream then too."""

    splits: ClassVar[bool] = False  # data-parallel replicas draw other numbers too
    words: ClassVar[str] = "on the model's random stream"
    phase: ClassVar[Phase] = Phase.SCOPE
    mixin: ClassVar[type[ParallelMixin]] = RngScope

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        context = ctx.context
        if context is None:
            return lambda: None  # one rank alone runs on torch's own generators
        # Looked up when all else has been committed: another module may have taken the place by then.
        return lambda: RngScope.swap_class(ctx.model.get_submodule(self.path), context, draws=ctx.draws)
