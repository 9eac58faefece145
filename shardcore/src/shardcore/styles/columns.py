"""The column linears of a region: what each of them computes, and so how it is cut.

A column linear is split over its output features, and the region's row linear over its input features. Both have to be
cut at the same places. What that asks of a linear depends on what it computes: one projection, several, or the keys
that ranks share. Each kind is a small class that says what does not fit, and by which parallel module it is split.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from shardcore.nn import ColumnLinear, FusedColumnLinear, ParallelMixin, RowLinear
from shardcore.nn.layout import are_parts
from shardcore.nn.linear.alike import Product
from shardcore.policy import HeadCounts
from shardcore.styles._finding import written


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSizes:
    """How a region is cut, whose ``row`` linear has ``width`` input features.

    Attributes:
        by_heads: it is cut between attention heads, not between any two columns.
        heads: the numbers of heads; None where the region is cut between columns, or they are not known.
        alone: one linear computes all that the row linear reads.
        inference_only: as the configuration says.
    """

    row: str
    width: int
    by_heads: bool
    heads: HeadCounts | None
    alone: bool
    inference_only: bool


#: First and one-past-last index of each of several runs of rows.
Runs = tuple[tuple[int, int], ...]
#: What a projection of an attention is.
Role = Literal["query", "key", "value"]
#: What does not fit, and what to do about it.
Misfit = tuple[str, str]
#: A parallel module and its options.
Target = tuple[type[ParallelMixin], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Column(ABC):
    """One column linear of a region, by its name."""

    name: str

    def without(self, cut: RegionSizes) -> Misfit | None:
        """Return what the region lacks for a column of this kind, whatever its sizes, or None."""
        return None

    @abstractmethod
    def misfits(self, linear: Product, cut: RegionSizes) -> Iterator[Misfit]:
        """Yield what does not fit between the linear and the rest of the region."""

    @abstractmethod
    def target(self, linear: Product, cut: RegionSizes) -> Target:
        """Return what the linear becomes. Precondition: it fits."""


@dataclass(frozen=True, slots=True)
class Fused(Column):
    """`shardcore.styles.segments` with equal ones; or one projection of queries or keys, of any width for each head."""

    segments: int = 1
    by: str = "head"
    of: Role = "query"

    def __repr__(self) -> str:
        return written("segments", self.name, self.segments, by=None if self.by == "projection" else self.by)

    @override
    def without(self, cut: RegionSizes) -> Misfit | None:
        if self.by == "head" and self.segments > 1 and not cut.by_heads:
            return "segments in the order of heads are cut between heads", 'say unit="head" or heads='
        return None

    @override
    def misfits(self, linear: Product, cut: RegionSizes) -> Iterator[Misfit]:
        size = linear.out_features
        if (self.by != "head" or not cut.by_heads) and size != self.segments * cut.width:
            many = f" in {self.segments} segments" if self.segments > 1 else ""
            what = f"it has out_features {size}{many}, but {cut.row} at the end of its region has in_features "
            what += f"{cut.width}; equal sizes are needed so that both are cut at the same places"
            yield what, "check which linears belong to this region"
        elif cut.alone and self.segments == 1 and size > cut.width and size % cut.width == 0:
            what = f"it has out_features {size}, {cut.row} in_features {cut.width}: several projections, in what order?"
            many = f"segments({self.name!r}, {size // cut.width}, by="
            yield what, f'say {many}"projection") for [q|k|v], or {many}"head") for [q0 k0 v0|q1 k1 v1|...]'
        if cut.by_heads and cut.heads is not None:
            count = cut.heads.query if self.of == "query" else cut.heads.kv
            if size % count:
                what = f"its {size} output features are not whole heads: the configuration counts {count}"
                yield what, "check Heads(...) in the policy's checks, or unit="

    @override
    def target(self, linear: Product, cut: RegionSizes) -> Target:
        replication = cut.heads.kv_replication if cut.heads and cut.heads.is_even and self.of != "query" else 1
        if replication > 1:
            # For inference alone, without states of optimizers to save: a collective less for each token is worth more.
            return ColumnLinear, {"replication": replication, **({"in_parts": False} if cut.inference_only else {})}
        if self.by == "head":  # head after head: cut between heads, like a linear that computes one projection
            return _by_heads(linear, cut, Order((self.of,)))
        if cut.heads is not None and not cut.heads.is_even:
            return _by_heads(linear, cut, Order((self.of,) * self.segments))
        return FusedColumnLinear, {"segments": self.segments}


@dataclass(frozen=True, slots=True)
class FusedHeads(Column):
    """`shardcore.styles.segments` with the roles of heads."""

    order: Order

    def __repr__(self) -> str:
        by, sizes = self.order.by, self.order.sizes
        return written("segments", self.name, self.order.roles, by=by if by == "group" else None, sizes=sizes or None)

    @override
    def without(self, cut: RegionSizes) -> Misfit | None:
        if not cut.by_heads:
            return "segments that are queries, keys or values are cut between heads", 'say unit="head" or heads='
        return None

    @override
    def misfits(self, linear: Product, cut: RegionSizes) -> Iterator[Misfit]:
        if cut.heads is None:
            return
        whole, sizes = self.order.heads(range(cut.heads.query), range(cut.heads.kv)), self.order.sizes
        wanted = sum(sizes[place] for place, _ in whole) if sizes else linear.out_features // len(whole) * len(whole)
        if linear.out_features != wanted:
            many = f"{wanted} features" if sizes else f"{len(whole)} heads of one size"
            what = (
                f"its {linear.out_features} output features are not {', '.join(self.order.roles)} of {cut.heads.query} "
            )
            what += f"query and {cut.heads.kv} key/value heads: that would be {many}"
            yield what, "check the roles of segments(...), and Heads(...) in the policy's checks"

    @override
    def target(self, linear: Product, cut: RegionSizes) -> Target:
        alike = cut.heads is not None and cut.heads.is_even and cut.heads.query == cut.heads.kv
        roles, sizes = self.order.roles, self.order.sizes
        if alike and self.order.by == "projection" and len(roles) > 1 and len(set(sizes)) < 2:
            return FusedColumnLinear, {"segments": len(roles)}
        return _by_heads(linear, cut, self.order)


@dataclass(frozen=True, slots=True)
class Order:
    """In which order the output features of a linear are those of heads.

    Attributes:
        roles: what its projections are: ``"query"``, ``"key"`` or ``"value"``.
        by: ``"projection"``: all heads of the first, then all of the next; ``"group"``: for each KV head, the query
            heads that attend to it, then the head itself, in the order of the roles.
        sizes: the features of a head in each projection; all are of one size if not given.
    """

    roles: tuple[Role, ...]
    by: str = "projection"
    sizes: tuple[int, ...] = ()

    def heads(self, query: Sequence[int], kv: Sequence[int]) -> list[tuple[int, int]]:
        """Return (place of the role, head) of each head in order, if these are the query heads and the KV heads."""
        if self.by == "projection":
            both = {True: query, False: kv}
            return [(i, head) for i, role in enumerate(self.roles) for head in both[role == "query"]]
        size = len(query) // len(kv)
        found: list[tuple[int, int]] = []
        for place, head in enumerate(kv):
            group = query[place * size : (place + 1) * size]
            for i, role in enumerate(self.roles):
                found += [(i, own) for own in group] if role == "query" else [(i, head)]
        return found

    def rows(self, size: int, counts: HeadCounts) -> tuple[Runs, ...]:
        """Return the rows of the heads that each rank uses, of a linear with ``size`` rows."""
        whole = self.heads(range(counts.query), range(counts.kv))
        sizes = self.sizes or (size // len(whole),) * len(self.roles)
        ends = itertools.accumulate(sizes[place] for place, _ in whole)
        at = {head: (end - sizes[head[0]], end) for head, end in zip(whole, ends, strict=True)}
        ranks = [counts.at(rank) for rank in range(counts.ranks)]
        return tuple(_merged([at[head] for head in self.heads(c.query_heads, c.kv_heads)]) for c in ranks)


def segments(
    name: str,
    what: int | tuple[Role, ...],
    *,
    by: Literal["projection", "head", "group"] = "projection",
    sizes: tuple[int, ...] = (),
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
        sizes: with roles, the features of one head in each projection, where they differ; 1 for a number for each head.
    """
    if isinstance(what, int):
        if by == "group" or sizes:
            raise ValueError(
                f'segments({name!r}, {what}): by="group" and sizes= need to know what is a "query", a "key"'
            )
        return Fused(name, what, by)
    unknown = [role for role in what if role not in ("query", "key", "value")]
    if unknown or "query" not in what or by == "head" or len(sizes) not in (0, len(what)):
        raise ValueError(
            f'segments({name!r}, {what!r}, by={by!r}): roles are "query", "key" and "value", the first among them, '
            'and lie by="projection" or by="group"; sizes= has one for each'
        )
    return FusedHeads(name, Order(tuple(what), by, sizes))


def row_target(cut: RegionSizes) -> Target:
    """Return what the row linear at the end of the region becomes."""
    columns = None if cut.heads is None or not cut.by_heads else Order(("query",)).rows(cut.width, cut.heads)
    if columns is None or are_parts(columns, cut.width):
        return RowLinear, {}
    return RowLinear, {"used": columns}


def _by_heads(linear: Product, cut: RegionSizes, order: Order) -> Target:
    """Return how a linear becomes one of which each rank uses its heads: those of the part that it holds, or others."""
    rows = None if cut.heads is None or not cut.by_heads else order.rows(linear.out_features, cut.heads)
    if rows is None or are_parts(rows, linear.out_features):
        return ColumnLinear, {}
    # For inference alone: as for KV heads that ranks share.
    return ColumnLinear, {"used": rows, **({"in_parts": False} if cut.inference_only else {})}


def _merged(heads: Sequence[tuple[int, int]]) -> Runs:
    """Return the rows of heads as runs: one for heads that follow each other."""
    runs: list[tuple[int, int]] = []
    for start, stop in heads:
        first = runs.pop()[0] if runs and runs[-1][1] == start else start
        runs.append((first, stop))
    return tuple(runs)
