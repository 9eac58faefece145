"""Steps by which tensors enter regions, inside of which gradients are partial: inputs of blocks, and arguments."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn
from typing_extensions import override

from shardcore.errors import Problem
from shardcore.nn.arguments import Argument, entered, sliced
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.layout import ReplicatedLayout
from shardcore.nn.linear.members import shared_parameters
from shardcore.nn.linear.parallel import ColumnLinear, RowLinear
from shardcore.nn.randomness import DropoutSites
from shardcore.nn.region.inner import InnerRegion, SoleRegion
from shardcore.nn.region.region import Region
from shardcore.nn.replicated import Replicated
from shardcore.plan.steps.base import ApplyContext, Commit, Phase, PlanView, Step, above


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterRegion(Step):
    """Activations enter a region where the module ``path`` is called.

    Attributes:
        argument: name and position of the entering argument.
        members: the column linears that share the entry.
        row: the row linear that ends the region; None if the region ends in its only member.
        block: the module that the region was declared for.
        at: modules below ``path`` whose outputs enter in place of the argument; members enter with their input.
        after: modules and bare parameters below ``path`` that act on what the row linear returns.
        beside: modules inside whose partial gradients are summed with those of the members.
    """

    phase: ClassVar[Phase] = Phase.ENTER

    argument: tuple[str, int]
    members: tuple[str, ...]
    row: str | None
    block: str
    at: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @override
    def describe(self) -> str:
        end = f", leaves at {self.short(self.row)}" if self.row else ""
        end += f" before {', '.join(map(self.short, self.after))}" if self.after else ""
        what = f"at {', '.join(map(self.short, self.at))}" if self.at else f"with {self.argument[0]!r}"
        return f"enters {what} for {', '.join(map(self.short, self.members))}{end}"

    @property
    @override
    def splits_heads(self) -> bool:
        return self.row is not None

    @property
    @override
    def gathers_tokens(self) -> tuple[str, ...]:
        return self.at

    @property
    @override
    def reads_together(self) -> tuple[str, ...]:
        return self.members

    def short(self, name: str) -> str:
        """Return a full name relative to the block."""
        return name.removeprefix(f"{self.block}.")

    @override
    def same_as(self, other: Step) -> bool:
        # A shared module may be reached from several blocks.
        return isinstance(other, EnterRegion) and (self.members, self.row) == (other.members, other.row)

    @override
    def conflict(self, other: Step) -> str | None:
        if isinstance(other, EnterRegion):
            return f"two regions would enter at {self.path}, so its input gradient would be summed twice"
        return None

    @override
    def check(self, plan: PlanView) -> Iterator[Problem]:
        for module in plan.model.get_submodule(self.path).modules():
            for step in plan.at_module(module):
                below = self.path in above(step.path)
                if below and step.enters:
                    yield step.problem(
                        f"it would enter again what entered the region at {self.path}: gradients are summed twice",
                        "make it one of the region's col=, or move the region's enter",
                    )
        if self.row is not None:
            for module in self._inside(plan.model):
                for step in plan.at_module(module):
                    if not step.sums_gradients:
                        yield from self._replicated(plan, step, module)

    def _inside(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that are provably inside of the region.

        A module that runs between the entry and the row linear works on this rank's activations, or its output is used
        by one that does: its gradient is partial, and if nobody sums it, replicas drift apart.
        """
        entry = model.get_submodule(self.path)
        if self.path not in self.members:
            own = (*self.members, *self.at, self.row or "")
            known = [m for name in (*own, *self.after) if (m := _module(model, name)) is not None]
            outside = {id(m) for module in known for m in module.modules()}
            return [m for m in entry.modules() if id(m) not in outside]
        # Nothing marks where a linear that enters by itself is called, but in a Sequential.
        return [m for module in _between(model, self.path, self.row or "") for m in module.modules()]

    def _replicated(self, plan: PlanView, step: Step, module: nn.Module) -> Iterator[Problem]:
        for name, parameter in module._parameters.items():
            full = ".".join(filter(None, (step.path, name)))
            # Another rule may say what becomes of single parameters of the module.
            claims = plan.claims.get(full, ()) if parameter is not None and full not in self.after else ()
            if claims and claims[0].layout == ReplicatedLayout():
                yield Problem(
                    where=full,
                    rule=claims[0].rule,
                    what=f"it is inside the region that is entered at {self.path or 'the model itself'} and left at "
                    f"{self.row}: its gradient would be this rank's summand, and the replicas would drift apart",
                    todo=f"say partial({self.short(step.path)!r}), which sums it; or after={self.short(full)!r} in the "
                    f"region's rule, if it acts on what {self.short(self.row or '')} returns",
                )

    @override
    def collectives(self, site: Site) -> Iterator[Collective]:
        if site.split:
            yield forward(self.path, "all_gather", "(B, S/tp, H) input")
            if not site.keeps_gathered and not self.at:
                yield backward(self.path, "all_gather", "(B, S/tp, H) input, again")
            if not self.at:
                yield backward(self.path, "reduce_scatter", "(B, S, H) input gradient")
        elif not self.at:
            yield backward(self.path, "all_reduce", "(B, S, H) input gradient")
        for place in self.at:
            what = "input" if place in self.members else "output"
            yield backward(place, "all_reduce", f"(B, S, ...) {what} gradient")
        yield from shared_parameters(self.path, [site.member(path) for path in self.members], self.beside)

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        model, tokens = ctx.model, ctx.tokens_at(self.path)
        module, block = model.get_submodule(self.path), model.get_submodule(self.block)
        members = [model.get_submodule(name) for name in self.members]
        last = model.get_submodule(self.row) if self.row else None
        inside = [model.get_submodule(name) for name in self.beside]
        inner = [(model.get_submodule(name), name in self.members) for name in self.at]

        def commit() -> None:
            # A linear that enters by itself has no dropout below it; those of its block's functional calls count.
            trees = [] if isinstance(module, ColumnLinear) else [module]
            dropouts = DropoutSites(trees, [block], ctx.draws) if last is not None else None
            columns = [m for m in members if isinstance(m, ColumnLinear)]
            beside = [m for m in inside if isinstance(m, Replicated)]
            region: Region
            if inner:
                region = InnerRegion(ctx.shared, self.argument, columns, dropouts, beside)
                module.register_forward_pre_hook(region, with_kwargs=True)
                region.enter_at(inner)
            elif isinstance(module, ColumnLinear) and members == [module] and module.uses_what_it_holds:
                region = module.sole_region = SoleRegion(ctx.shared, module, dropouts)
            else:
                region = Region(ctx.shared, self.argument, columns, dropouts, beside)
                module.register_forward_pre_hook(region, with_kwargs=True)
            region.sequence = tokens
            if isinstance(last, RowLinear):
                last.region = region

        return commit


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterArgument(Step):
    """A further tensor, an argument of the module ``path``, enters the regions below it, once for all of them."""

    argument: tuple[str, int]

    @override
    def describe(self) -> str:
        return f"enters {self.argument[0]!r} for all regions below"

    @override
    def collectives(self, site: Site) -> Iterator[Collective]:
        yield backward(self.path, "all_reduce", f"gradient of {self.argument[0]}")

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        module = ctx.model.get_submodule(self.path)
        hook = Argument(*self.argument).hook(functools.partial(entered, ctx.shared))
        return functools.partial(module.register_forward_pre_hook, hook, with_kwargs=True)


def _between(model: nn.Module, first: str, last: str) -> Iterator[nn.Module]:
    """Yield the modules that a Sequential with both linears calls after the one and before the other."""
    parent, _, start = first.rpartition(".")
    other, _, stop = last.rpartition(".")
    sequence = model.get_submodule(parent)
    if parent != other or type(sequence).forward is not nn.Sequential.forward:
        return
    names = list(sequence._modules)
    for name in names[names.index(start) + 1 : names.index(stop)]:
        yield sequence.get_submodule(name)


def _module(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a bare parameter
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceArgument(Step):
    """An argument of the module ``path`` is cut to the heads of the rank.

    The argument has all ``heads`` along ``dim``; if ``partial``, what makes it sums its own gradient. Else what that
    costs is not counted: a plan cannot know whether it needs one, and masks and slopes do not.
    """

    # Before the entry of a region at the same module looks at its arguments.
    phase: ClassVar[Phase] = Phase.CHANGE

    argument: tuple[str, int]
    dim: int
    heads: int
    partial: bool = False

    @override
    def describe(self) -> str:
        summed = ", its gradient summed by what makes it" if self.partial else ""
        return f"cuts {self.argument[0]!r} on dim {self.dim} to this rank's part of {self.heads} heads{summed}"

    @override
    def conflict(self, other: Step) -> str | None:
        if isinstance(other, SliceArgument) and other.argument == self.argument:
            return f"the argument {self.argument[0]!r} of {self.path} would be cut twice"
        return None

    @override
    def prepare(self, ctx: ApplyContext) -> Commit:
        module = ctx.model.get_submodule(self.path)
        change = functools.partial(sliced, ctx.shared, self.dim, self.heads, self.partial)
        hook = Argument(*self.argument).hook(change)
        return functools.partial(module.register_forward_pre_hook, hook, with_kwargs=True)
