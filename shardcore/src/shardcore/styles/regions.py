"""Words for regions: the parts of a block in which activations are split over the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from typing_extensions import override

from shardcore.nn import ColumnLinear, Replicated
from shardcore.nn.layout import last_rank_is_empty
from shardcore.nn.linear.alike import Product, product_of
from shardcore.nn.linear.inside import InnerRowLinear
from shardcore.plan.steps import EnterArgument, EnterRegion, Step
from shardcore.policy import HeadCounts, Rule, Scope
from shardcore.styles._finding import argument_of, is_parameter, number_of
from shardcore.styles._text import names_of, written
from shardcore.styles.columns import Column, Cut, Fused, FusedHeads, KeyValue, Projection, Role, row_target

__all__ = ["enter_arg", "region", "segments"]


#: A column linear by its name, or one that computes several projections.
Columns = str | Column


def region(
    *,
    col: Columns | tuple[Columns, ...],
    row: str,
    enter: str | None = None,
    arg: str | None = None,
    at: str | tuple[str, ...] = (),
    inside: str | tuple[str, ...] = (),
    after: str | tuple[str, ...] = (),
    partial: str | tuple[str, ...] = (),
    kv: str | tuple[str, ...] = (),
    unit: Literal["column", "head"] = "column",
    heads: str | None = None,
    optional: bool = False,
) -> Rule:
    """Column linears and the row linear that follows them, with activations split over the ranks in between.

    Args:
        col: linears split over their output features; `segments` for one that computes several projections.
        row: the linear, split over its input features, that ends the region. Its outputs are summed over the ranks.
        enter: the module whose call enters the region: in the backward, the gradient of its input is summed there, once
            for all column linears. It must not contain the residual connection. ``None``: each column linear enters by
            itself, with an all-reduce of its own.
        arg: the argument of that module's ``forward`` that enters; by default the first.
        at: modules inside of the module ``enter`` whose outputs enter, in place of its argument: replicated linears
            from which several ways lead to the heads, as the low-rank projections of latent attention do. What runs
            before them is computed alike on all ranks and needs no `partial`. A linear of ``col`` enters with its
            input.
        inside: row linears in the middle of the region, whose outputs each rank's channels read again, as the steps of
            Mamba are made of all channels. Their outputs are summed over the ranks, and the gradients of these too.
        after: modules or bare parameters inside the module ``enter`` that act on the output of ``row``, such as a norm
            or a scale at its end. It is summed already, so they need no `partial`.
        partial: modules inside the module ``enter`` that each rank applies to its heads, such as norms of queries and
            keys: what the rule `partial` says of them, but their gradients are summed together, in one all-reduce of
            the region.
        kv: key and value linears. With fewer KV heads than ranks, neighbouring ranks compute the same head.
        unit: what is never split: a single column, or an attention head, as the policy's ``Heads`` check counts them.
        heads: the attribute that counts the heads of this one module, in place of the policy's check.
        optional: the region may be absent.
    """
    text = written(
        "region",
        enter=enter,
        arg=arg,
        at=at or None,
        inside=inside or None,
        after=after or None,
        partial=partial or None,
        col=col,
        kv=kv or None,
        row=row,
        unit=None if unit == "column" else unit,
        heads=heads,
    )
    columns = col if isinstance(col, tuple) else (col,)
    return RegionRule(
        text=text,
        optional=optional,
        enter=enter,
        arg=arg,
        at=names_of(at),
        inside=names_of(inside),
        after=names_of(after),
        partial=names_of(partial),
        col=tuple(Projection(c) if isinstance(c, str) else c for c in columns),
        kv=tuple(map(KeyValue, names_of(kv))),
        row=row,
        unit="head" if heads else unit,
        heads=heads,
    )


def segments(
    name: str,
    what: int | tuple[Role, ...],
    *,
    by: Literal["projection", "head", "group"] = "projection",
) -> Column:
    """A linear that computes several projections at once; for ``col=`` of a `region`.

    Args:
        name: the linear.
        what: the number of projections, if all are equally wide; or what each of them is: ``("query", "key", "value")``
            where there are fewer KV heads than query heads. The heads of all are of one size. With fewer KV heads than
            ranks, neighbouring ranks compute the same head.
        by: the order of its output features. ``"projection"``: one projection after the other, [q|k|v].
            ``"head"``: head after head, [q0 k0 v0|q1 k1 v1|...]. ``"group"``: for each KV head, the query heads that
            attend to it and then the head itself, [q0 q1 k0 v0|q2 q3 k1 v1|...].
    """
    if isinstance(what, int):
        if by == "group":
            raise ValueError(f'segments({name!r}, {what}, by="group"): say what they are, ("query", "key", "value")')
        return Fused(name, what, by)
    unknown = [role for role in what if role not in ("query", "key", "value")]
    if unknown or "query" not in what or by == "head":
        raise ValueError(
            f'segments({name!r}, {what!r}, by={by!r}): roles are "query", "key" and "value", the first among them, '
            'and lie by="projection" or by="group"'
        )
    return FusedHeads(name, tuple(what), by)


def enter_arg(module: str, name: str, *, optional: bool = False) -> Rule:
    """Enter one tensor into the regions of all blocks of a stack, such as the encoder states that they attend to.

    This costs one backward all-reduce for the model instead of one in each block.

    Args:
        module: the module whose ``forward`` takes the tensor (``""`` for the one that the rule is listed under).
        name: the argument of that ``forward``; where it is None, or needs no gradient, nothing is done.
        optional: the module may be absent.
    """
    return EnterArgRule(text=written("enter_arg", module, name), optional=optional, module=module, name=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionRule(Rule):
    """`shardcore.styles.region`."""

    enter: str | None
    arg: str | None
    col: tuple[Column, ...]
    kv: tuple[Column, ...]
    row: str
    unit: str
    at: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    heads: str | None = None

    @property
    def columns(self) -> tuple[Column, ...]:
        """All column linears."""
        return (*self.col, *self.kv)

    @override
    def plan(self, scope: Scope) -> None:
        found = {name: scope.find(name) for name in (*(c.name for c in self.columns), *self.inside, self.row)}
        modules = {name: m for name, m in found.items() if m is not None}
        linears = {name: p for name, m in modules.items() if isinstance(p := product_of(m), Product)}
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
        self._check_after(scope)
        self._check_at(scope)
        for name in self.partial:
            if scope.find(name) is not None:
                scope.swap(name, Replicated, partial=True, with_region=self.enter is not None and entry is not None)
        for column in self.columns:
            target, options = column.target(linears[column.name], cut)
            scope.swap(column.name, target, enters=entry is None, **options)
        for name in self.inside:
            scope.swap(name, InnerRowLinear)
        target, options = row_target(linears[self.row], cut)
        scope.swap(self.row, target, **options)
        if entry is not None:
            scope.add(entry)
        if cut.by_heads:
            scope.splits_attention(self.row)

    def _cut(self, scope: Scope, linears: dict[str, Product]) -> Cut | None:
        """Return how the region is cut; record what does not fit together.

        Sizes of heads were checked by the policy's ``Heads``.
        """
        by_heads = self.unit == "head" or bool(self.kv)
        cut = Cut(
            row=self.row,
            width=linears[self.row].in_features,
            by_heads=by_heads,
            heads=self._heads(scope) if by_heads else None,
            inference_only=bool(scope.config.inference_only),
        )
        lacks = [lack for column in self.columns if (lack := column.without(cut))]
        for what, todo in lacks:
            scope.problem(what, todo)
        if lacks:
            return None
        misfits = [(c.name, *misfit) for c in self.columns for misfit in c.misfits(linears[c.name], cut)]
        if cut.heads is not None and cut.width % cut.heads.query:
            what = f"its {cut.width} input features are not whole heads: the configuration counts {cut.heads.query}"
            misfits.append((self.row, what, "check Heads(...) in the policy's checks, or unit="))
        for name in self.inside:
            if (size := linears[name].in_features) != cut.width:
                what = f"it has in_features {size}, but {self.row} at the end of its region has {cut.width}"
                misfits.append((name, f"{what}; both read the same channels", "correct inside="))
        for name, what, todo in misfits:
            scope.problem(what, todo, name)
        return None if misfits or (by_heads and cut.heads is None) else cut

    def _heads(self, scope: Scope) -> HeadCounts | None:
        """Return the head counts of the policy, or of this one module; record what is wrong with the latter."""
        if self.heads is None:
            return scope.heads
        count = number_of(scope, self.heads)
        if count is None:
            return None
        if count % scope.ranks:
            scope.problem(
                f"{count} heads ({self.heads}) cannot be split over {scope.ranks} ranks: whole heads are needed on "
                "each rank, and uneven heads are not supported yet",
                f"use a tensor_parallel_size that divides {count}, or say when_divisible in the policy",
            )
            return None
        return HeadCounts(query=count, kv=count, ranks=scope.ranks)

    def _entry(self, scope: Scope) -> Step | None:
        """Return where the region is entered, or None if its several column linears enter by themselves.

        Under ``inference_only`` no region is entered, unless tokens are gathered at its entry, or more than its linears
        depends on it: the forward sends nothing there. Users may still call backward; linears that enter by themselves
        stay correct, and cost nothing in the forward.
        """
        members = tuple(scope.name(column.name) for column in self.columns)
        place = self.enter if self.enter is not None else self.col[0].name
        if self.enter is None and len(members) > 1:
            if self.inside:
                todo = "leave it out, or name the module with enter="
                scope.problem("inside= is for a region that is entered at the module of enter=", todo)
            return None
        # Linears that enter by themselves would not sum what else leads to the heads, or sum it twice.
        if _needs_no_entry(scope) and not self.at and not self.inside:
            return None
        module = scope.find(place)
        argument = None if module is None else argument_of(module, self.arg)
        if module is not None and argument is None:
            scope.problem(
                f"{type(module).__name__}.forward has no argument {self.arg!r}"
                if self.arg
                else f"{type(module).__name__}.forward names no argument",
                "name the entering argument with arg=",
                place,
            )
        if argument is None:
            return None
        return EnterRegion(
            path=scope.name(place),
            argument=argument,
            members=members,
            row=scope.name(self.row),
            block=scope.name(""),
            at=tuple(scope.name(name) for name in self.at),
            after=tuple(scope.name(name) for name in self.after),
            beside=() if self.enter is None else tuple(map(scope.name, self._beside(scope))),
        )

    def _beside(self, scope: Scope) -> Iterator[str]:
        """Yield the modules of ``partial=`` that have parameters: a norm that a model leaves out may be an identity."""
        for name in self.partial:
            module = scope.find(name)
            if module is not None and any(p is not None for p in module._parameters.values()):
                yield name

    def _check_at(self, scope: Scope) -> None:
        """Record what cannot be meant by ``at=``."""
        todo = "name modules inside the module of enter=, on the way from its input to the column linears"
        if self.at and self.enter is None:
            scope.problem("at= without enter=: nothing says where tokens are gathered", todo)
            return
        for name in self.at:
            below = f"{scope.name(name)}.".startswith(f"{scope.name(self.enter or '')}.".lstrip("."))
            if scope.find(name) is None:
                continue  # recorded
            if not below or name == self.enter:
                scope.problem(f"at={name!r} is not inside of {self.enter!r}, where the region is entered", todo)
            elif name in (*(c.name for c in self.kv), *self.inside, *self.after, self.row):
                scope.problem(f"at={name!r} is a part of the region behind its entry", todo)

    def _check_after(self, scope: Scope) -> None:
        """Record what cannot be meant by ``after=``."""
        todo = "name modules or bare parameters inside the module of enter=, which run after the row linear"
        if self.after and self.enter is None:
            scope.problem("after= without enter=: nothing else is taken to be inside of the region", todo)
            return
        for name in self.after:
            owner, _, parameter = name.rpartition(".")
            below = f"{scope.name(name)}.".startswith(f"{scope.name(self.enter or '')}.".lstrip("."))
            linears = (*(c.name for c in self.columns), *self.inside, self.row)
            own = [n for n in linears if f"{n}.".startswith(f"{name}.")]
            if not is_parameter(scope.module, owner, parameter) and scope.find(name) is None:
                continue  # recorded
            if not below or name == self.enter:
                scope.problem(f"after={name!r} is not inside of {self.enter!r}, where the region is entered", todo)
            elif own:
                scope.problem(f"after={name!r} is or holds {own[0]!r} of the region itself", todo)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterArgRule(Rule):
    """`shardcore.styles.enter_arg`."""

    module: str
    name: str

    @override
    def plan(self, scope: Scope) -> None:
        module = scope.find(self.module)
        if module is None or _needs_no_entry(scope):
            return
        argument = argument_of(module, self.name)
        if argument is None:
            scope.problem(f"{type(module).__name__}.forward has no argument {self.name!r}", "correct it", self.module)
        else:
            scope.add(EnterArgument(path=scope.name(self.module), argument=argument))


def _needs_no_entry(scope: Scope) -> bool:
    """Tell whether nothing happens where activations enter: no backward, and no tokens that are gathered there."""
    return scope.config.inference_only and not scope.config.enable_sequence_parallelism
