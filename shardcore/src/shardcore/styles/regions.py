"""Words for regions: the parts of a block in which activations are split over the ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn
from typing_extensions import override

from shardcore.nn import ColumnLinear, Replicated
from shardcore.nn.layout import last_rank_is_empty
from shardcore.nn.linear.alike import Product, product_of
from shardcore.nn.linear.parallel import InnerRowLinear
from shardcore.plan.steps.base import Step
from shardcore.plan.steps.modules import ByRank, SetAttribute
from shardcore.plan.steps.regions import EnterArgument, EnterRegion
from shardcore.policy import HeadCounts, Heads, Rule, Scope, Word
from shardcore.styles._finding import argument_of, heads_of, is_in, is_parameter, names_of, submodule, written
from shardcore.styles.columns import Column, Fused, FusedHeads, RegionSizes, row_target

#: A column linear by its name, or one that computes several projections.
Columns = str | Column


def region(
    *,
    col: Columns | tuple[Columns, ...],
    row: str | tuple[str, ...],
    enter: str | tuple[str, ...] | None = None,
    after: str | tuple[str, ...] = (),
    partial: Columns | tuple[Columns, ...] = (),
    kv: str | tuple[str, ...] = (),
    unit: Literal["column", "head"] = "column",
    heads: str | Heads | None = None,
    optional: bool = False,
) -> Rule:
    """Column linears and the row linear that follows them, with activations split over the ranks in between.

    Args:
        col: linears split over their output features; `segments` for one that computes several projections.
        row: the linear, split over its input features, that ends the region. Its outputs are summed over the ranks.
            Of several the last ends it; what those before it return is read by each rank's channels again, as the steps
            of Mamba are made of all channels, so that its gradients are summed too.
        enter: what enters the region, replicated: in the backward its gradient is summed there, once for all column
            linears. A module that holds these enters with the first argument of its call, or with the one that is named
            after it (``"cross.states"``); it must not contain the residual connection. Modules that run before them
            enter with what they return: replicated linears from which several ways lead to the heads, as the low-rank
            projections of latent attention do. What runs before those is computed alike on all ranks and needs no
            `partial`. A linear of ``col`` beside them enters with its input. ``None``: each column linear enters by
            itself, with an all-reduce of its own.
        after: modules or bare parameters inside the module that enters that act on the output of ``row``, such as a
            norm or a scale at its end. It is summed already, so they need no `partial`.
        partial: modules inside the module that enters that each rank applies to its heads, such as norms of queries and
            keys: what the rule `partial` says of them, but their gradients are summed together, in one all-reduce of
            the region. `segments` for a depthwise convolution over several projections: each rank uses its channels.
        kv: key and value linears. With fewer KV heads than ranks, neighbouring ranks compute the same head.
        unit: what is never split: a single column, or an attention head, as the policy's ``Heads`` check counts them.
        heads: the attribute that counts the heads of this one module, or their numbers, in place of the policy's check.
        optional: the region may be absent.
    """
    text = written(
        "region",
        enter=enter,
        after=after or None,
        partial=partial or None,
        col=col,
        kv=kv or None,
        row=row,
        unit=None if unit == "column" else unit,
        heads=heads,
    )
    columns, applied = (c if isinstance(c, tuple) else (c,) for c in (col, partial))
    *inside, last = names_of(row)
    return RegionRule(
        text=text,
        optional=optional,
        enter=() if enter is None else names_of(enter),
        inside=tuple(inside),
        after=names_of(after),
        partial=tuple(name for name in applied if isinstance(name, str)),
        channels=tuple(column for column in applied if isinstance(column, FusedHeads)),
        col=tuple(Fused(c) if isinstance(c, str) else c for c in columns),
        kv=tuple(Fused(name, of="key") for name in names_of(kv)),
        row=last,
        by_heads=unit == "head" or bool(heads or kv),
        heads=heads,
    )


def enter_arg(module: str, name: str, *, optional: bool = False) -> Rule:
    """Enter one tensor into the regions of all blocks of a stack, such as the encoder states that they attend to.

    This costs one backward all-reduce for the model instead of one in each block.

    Args:
        module: the module whose ``forward`` takes the tensor (``""`` for the one that the rule is listed under).
        name: the argument of that ``forward``; where it is None, or needs no gradient, nothing is done.
        optional: the module may be absent.
    """

    def plan(scope: Scope) -> None:
        found = scope.find(module)
        if found is None or _needs_no_entry(scope):
            return
        argument = argument_of(found, name)
        if argument is None:
            scope.problem(f"{type(found).__name__}.forward has no argument {name!r}", "correct it", module)
        else:
            scope.add(EnterArgument(path=scope.name(module), argument=argument))

    return Word(text=written("enter_arg", module, name), optional=optional, planned=plan)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRule(Rule):
    """`shardcore.styles.region`."""

    enter: tuple[str, ...]
    col: tuple[Column, ...]
    kv: tuple[Column, ...]
    row: str
    by_heads: bool
    inside: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    channels: tuple[FusedHeads, ...] = ()
    heads: str | Heads | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """All column linears."""
        return (*self.col, *self.kv)

    @override
    def plan(self, scope: Scope) -> None:
        columns = (*self.columns, *self.channels)
        found = {name: scope.find(name) for name in (*(c.name for c in columns), *self.inside, self.row)}
        modules = {name: m for name, m in found.items() if m is not None}
        linears = {name: p for name, m in modules.items() if isinstance(p := _product(m), Product)}
        for name, module in found.items():
            if module is not None and name not in linears:
                scope.swap(name, ColumnLinear)  # records what is wrong with it
        missing = [name for name, module in found.items() if module is None]
        if self.optional and 0 < len(missing) < len(found):
            what = f"only a part of the region is there, without {', '.join(missing)}"
            scope.problem(what, "correct the names: with optional=True the whole region may be absent")
        cut = self._cut(scope, linears) if len(linears) == len(found) else None
        if cut is None:
            for name in linears:
                for parameter in modules[name]._parameters:
                    scope.claim(name, parameter, None)  # said already: not "covered by no rule" too
            return
        if not cut.by_heads and last_rank_is_empty(cut.width, scope.ranks):
            for name in linears:
                scope.swap(name, Replicated)
            return
        entry = self._entry(scope)
        self._check_after(scope, entry)
        options: dict[str, Any] = {"partial": True, "with_region": bool(self.enter) and entry is not None}
        for name in self.partial:
            if scope.find(name) is not None:
                scope.swap(name, Replicated, **options)
        for name, order in ((channels.name, channels.order) for channels in self.channels):
            used = order.rows(linears[name].out_features, cut.heads) if cut.heads else ()
            scope.swap(name, Replicated, **options, used=used)
            groups = ByRank.of([sum(stop - start for start, stop in runs) for runs in used])
            scope.add(SetAttribute(path=scope.name(name), name="groups", value=groups))
        for column in self.columns:
            target, options = column.target(linears[column.name], cut)
            scope.swap(column.name, target, enters=entry is None, **options)
        for name in self.inside:
            scope.swap(name, InnerRowLinear)
        target, options = row_target(cut)
        scope.swap(self.row, target, **options)
        if entry is not None:
            scope.add(entry)
        if cut.by_heads:
            scope.splits_attention(self.row)

    def _cut(self, scope: Scope, linears: dict[str, Product]) -> RegionSizes | None:
        """Return how the region is cut; record what does not fit together.

        Sizes of heads were checked by the policy's ``Heads``.
        """
        cut = RegionSizes(
            row=self.row,
            width=linears[self.row].in_features,
            by_heads=self.by_heads,
            heads=self._heads(scope) if self.by_heads else None,
            alone=len(self.columns) == 1,
            inference_only=scope.config.inference_only,
        )
        columns = (*self.columns, *self.channels)
        misfits = [("", *lack) for c in columns if (lack := c.without(cut))]
        misfits = misfits or [(c.name, *misfit) for c in columns for misfit in c.misfits(linears[c.name], cut)]
        if cut.heads is not None and cut.width % cut.heads.query:
            what = f"its {cut.width} input features are not whole heads: the configuration counts {cut.heads.query}"
            misfits.append((self.row, what, "check Heads(...) in the policy's checks, or unit="))
        for name in self.inside:
            if (size := linears[name].in_features) != cut.width:
                what = f"it has in_features {size}, but {self.row} at the end of its region has {cut.width}"
                misfits.append((name, f"{what}; both read the same channels", "correct row="))
        for name, what, todo in misfits:
            scope.problem(what, todo, name)
        return None if misfits or (self.by_heads and cut.heads is None) else cut

    def _heads(self, scope: Scope) -> HeadCounts | None:
        """Return the head counts of the policy, or of this one module; record what is wrong with the latter."""
        heads = heads_of(scope, self.heads)
        if isinstance(self.heads, str) and heads is not None and not heads.is_even:
            scope.problem(
                f"{heads.query} heads ({self.heads}) cannot be split over {scope.ranks} ranks: whole heads are needed "
                "on each rank, and uneven heads are not supported yet",
                f"use a tensor_parallel_size that divides {heads.query}, or say when_divisible in the policy",
            )
            return None
        return heads

    def _entry(self, scope: Scope) -> Step | None:
        """Return where the region is entered, or None if its several column linears enter by themselves.

        Under ``inference_only`` no region is entered, unless tokens are gathered at its entry, or more than its linears
        depends on it: the forward sends nothing there. Users may still call backward; linears that enter by themselves
        stay correct, and cost nothing in the forward.
        """
        members = tuple(scope.name(column.name) for column in self.columns)
        if not self.enter and len(members) > 1:
            if self.inside:
                scope.problem("several row linears are for a region that is entered at a module", "name it with enter=")
            return None
        way = self._way(scope) if self.enter else (self.col[0].name, None, ())
        if way is None:
            return None
        place, name, at = way
        # Linears that enter by themselves would not sum what else leads to the heads, or sum it twice.
        if _needs_no_entry(scope) and not at and not self.inside:
            return None
        module = submodule(scope.module, place)
        argument = None if module is None else argument_of(module, name)
        if argument is None:
            what = f"{type(module).__name__}.forward names no argument"
            scope.problem(what, "name the one that enters: enter='module.argument'", place)
            return None
        return EnterRegion(
            path=scope.name(place),
            argument=argument,
            members=members,
            row=scope.name(self.row),
            block=scope.name(""),
            at=tuple(map(scope.name, at)),
            after=tuple(map(scope.name, self.after)),
            beside=tuple(map(scope.name, self._beside(scope))) if self.enter else (),
        )

    def _way(self, scope: Scope) -> tuple[str, str | None, tuple[str, ...]] | None:
        """Return the module at which it is entered, the argument that is named, and what enters inside of it instead.

        Records what cannot be meant, and returns None then.
        """
        columns = [c.name for c in self.columns]
        behind = (*(c.name for c in self.kv), *self.inside, *self.after, self.row)
        places: list[tuple[str, str | None]] = []
        at = []
        for name in self.enter:
            owner, _, argument = name.rpartition(".")
            module, holder = submodule(scope.module, name), submodule(scope.module, owner)
            if module is not None and any(is_in(column, name) for column in columns if column != name):
                places.append((name, None))
            elif name in behind:
                scope.problem(f"enter={name!r} is a part of the region behind its entry", "name what runs before it")
                return None
            elif module is not None:
                at.append(name)
            elif holder is not None and argument_of(holder, argument) is not None:
                places.append((owner, argument))
            else:
                scope.find(name)  # records that it is absent
                return None
        if len(at) == 1 and at[0] in columns and not places:
            return at[0], None, ()
        if len(places) > 1:
            scope.problem(f"enter= names {len(places)} modules that hold its linears", "keep one of them")
            return None
        return (*(places[0] if places else (_common((*at, *columns)), None)), tuple(at))

    def _beside(self, scope: Scope) -> Iterator[str]:
        """Yield the modules of ``partial=`` that have parameters: a norm that a model leaves out may be an identity."""
        for name in (*self.partial, *(c.name for c in self.channels)):
            module = scope.find(name)
            if module is not None and any(p is not None for p in module._parameters.values()):
                yield name

    def _check_after(self, scope: Scope, entry: Step | None) -> None:
        """Record what cannot be meant by ``after=``."""
        todo = "name modules or bare parameters inside the module of enter=, which run after the row linear"
        if self.after and not self.enter:
            scope.problem("after= without enter=: nothing else is taken to be inside of the region", todo)
        if entry is None:
            return
        for name in self.after:
            owner, _, parameter = name.rpartition(".")
            linears = (*(c.name for c in self.columns), *self.inside, self.row)
            own = [n for n in linears if is_in(n, name)]
            if not is_parameter(scope.module, owner, parameter) and scope.find(name) is None:
                continue  # recorded
            if scope.name(name) == entry.path or not is_in(scope.name(name), entry.path):
                where = entry.path.removeprefix(f"{scope.name('')}.")
                scope.problem(f"after={name!r} is not inside of {where!r}, where the region is entered", todo)
            elif own:
                scope.problem(f"after={name!r} is or holds {own[0]!r} of the region itself", todo)


def _product(module: nn.Module) -> Product | str:
    """Return what a linear multiplies, or say why it is none; the channels of a depthwise convolution are features."""
    if isinstance(module, nn.Conv1d) and module.groups == module.in_channels == module.out_channels:
        return Product(module.in_channels, module.out_channels)
    return product_of(module)


def _needs_no_entry(scope: Scope) -> bool:
    """Tell whether nothing happens where activations enter: no backward, and no tokens that are gathered there."""
    return scope.config.inference_only and not scope.config.enable_sequence_parallelism


def _common(names: tuple[str, ...]) -> str:
    """Return the innermost module that holds all of these."""
    holders = [name.split(".")[:-1] for name in names]
    same = itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*holders, strict=False))
    return ".".join(parts[0] for parts in same)
