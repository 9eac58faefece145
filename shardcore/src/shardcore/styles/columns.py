"""The column linears of a region: what each of them computes, and so how it is cut.

A column linear is split over its output features, and the region's row linear over its input features. Both have to be
cut at the same places. What that asks of a linear depends on what it computes: one projection, several, or the keys
that ranks share. Each kind is a small class that says what does not fit, and by which parallel module it is split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from shardcore.nn import ColumnLinear, FusedColumnLinear, ParallelMixin, RowLinear
from shardcore.nn.layout import are_parts
from shardcore.nn.linear.alike import Product
from shardcore.policy import HeadCounts

__all__ = ["Column", "Fused", "FusedHeads", "KeyValue", "Order", "Projection", "RegionSizes", "Role", "row_target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionSizes:
    """How a region is cut.

    Attributes:
        row: the name of the row linear at its end.
        width: the input features of the row linear.
        by_heads: it is cut between attention heads, not between any two columns.
        heads: the numbers of heads; None where the region is cut between columns, or they are not known.
        inference_only: as the configuration says.
    """

    row: str
    width: int
    by_heads: bool
    heads: HeadCounts | None
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
class Projection(Column):
    """One projection: as wide as the input of the row linear, or of any width for each head."""

    @override
    def misfits(self, linear: Product, cut: RegionSizes) -> Iterator[Misfit]:
        if not cut.by_heads:
            yield from _of_other_size(linear, cut, 1)
        elif cut.heads is not None:
            yield from _not_whole_heads(linear, cut.heads.query)

    @override
    def target(self, linear: Product, cut: RegionSizes) -> Target:
        return _by_heads(linear, cut, Order(("query",))) or (ColumnLinear, {})


@dataclass(frozen=True, slots=True)
class KeyValue(Column):
    """Keys or values. With fewer KV heads than ranks, neighbouring ranks compute the same head."""

    @override
    def misfits(self, linear: Product, cut: RegionSizes) -> Iterator[Misfit]:
        if cut.heads is not None:
            yield from _not_whole_heads(linear, cut.heads.kv)

    @override
    def target(self, linear: Product, cut: RegionSizes) -> Target:
        replication = cut.heads.kv_replication if cut.heads else 1
        options: dict[str, Any] = {"replication": replication} if replication > 1 else {}
        if not options or (cut.heads is not None and not cut.heads.is_even):
            return _by_heads(linear, cut, Order(("key",))) or (ColumnLinear, options)
        if cut.inference_only:
            # No optimizer state to save: a collective less for each token is worth more.
            options["in_parts"] = False
        return ColumnLinear, options


@dataclass(frozen=True, slots=True)
class Fused(Column):
    """`shardcore.styles.segments` with a number of equal ones."""

    segments: int
    by: str = "projection"

    def __repr__(self) -> str:
        by = "" if self.by == "projection" else f", by={self.by!r}"
        return f"segments({self.name!r}, {self.segments}{by})"

    @override
    def without(self, cut: RegionSizes) -> Misfit | None:
        if self.by == "head" and not cut.by_heads:
            return "segments in the order of heads are cut between heads", 'say unit="head" or heads='
        return None

    @override
    def misfits(self, linear: Product, cut: RegionSizes) -> Iterator[Misfit]:
        if self.by != "head":
            yield from _of_other_size(linear, cut, self.segments)
        if cut.by_heads and cut.heads is not None:
            yield from _not_whole_heads(linear, cut.heads.query)

    @override
    def target(self, linear: Product, cut: RegionSizes) -> Target:
        if self.by == "head":  # head after head: cut between heads, like a linear that computes one projection
            return _by_heads(linear, cut, Order(("query",))) or (ColumnLinear, {})
        if cut.heads is not None and not cut.heads.is_even:
            roles: tuple[Role, ...] = tuple("query" for _ in range(self.segments))
            return _by_heads(linear, cut, Order(roles)) or (ColumnLinear, {})
        return FusedColumnLinear, {"segments": self.segments}


@dataclass(frozen=True, slots=True)
class FusedHeads(Column):
    """`shardcore.styles.segments` with the roles of heads."""

    roles: tuple[Role, ...]
    by: str = "projection"

    def __repr__(self) -> str:
        by = "" if self.by == "projection" else f", by={self.by!r}"
        return f"segments({self.name!r}, {self.roles!r}{by})"

    @override
    def without(self, cut: RegionSizes) -> Misfit | None:
        if not cut.by_heads:
            return "segments that are queries, keys or values are cut between heads", 'say unit="head" or heads='
        return None

    @override
    def misfits(self, linear: Product, cut: RegionSizes) -> Iterator[Misfit]:
        if cut.heads is None:
            return
        count = len(Order(self.roles, self.by).heads(range(cut.heads.query), range(cut.heads.kv)))
        if linear.out_features % count != 0:
            what = (
                f"its {linear.out_features} output features are not {', '.join(self.roles)} of {cut.heads.query} query "
                f"and {cut.heads.kv} key/value heads: that would be {count} heads of one size"
            )
            yield what, "check the roles of segments(...), and Heads(...) in the policy's checks"

    @override
    def target(self, linear: Product, cut: RegionSizes) -> Target:
        alike = cut.heads is not None and cut.heads.is_even and cut.heads.query == cut.heads.kv
        if alike and self.by == "projection" and len(self.roles) > 1:
            return FusedColumnLinear, {"segments": len(self.roles)}
        return _by_heads(linear, cut, Order(self.roles, self.by)) or (ColumnLinear, {})


@dataclass(frozen=True, slots=True)
class Order:
    """In which order the output features of a linear are those of heads.

    Attributes:
        roles: what its projections are: ``"query"``, ``"key"`` or ``"value"``.
        by: ``"projection"``: all heads of the first, then all of the next; ``"group"``: for each KV head, the query
            heads that attend to it, then the head itself, in the order of the roles.
    """

    roles: tuple[Role, ...]
    by: str = "projection"

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
        step, at = size // len(whole), {head: place for place, head in enumerate(whole)}
        ranks = [counts.at(rank) for rank in range(counts.ranks)]
        return tuple(_merged([at[head] for head in self.heads(c.query_heads, c.kv_heads)], step) for c in ranks)


def row_target(linear: Product, cut: RegionSizes) -> Target:
    """Return what the row linear at the end of the region becomes."""
    columns = None if cut.heads is None or not cut.by_heads else Order(("query",)).rows(cut.width, cut.heads)
    if columns is None or are_parts(columns, cut.width):
        return RowLinear, {}
    return RowLinear, {"used": columns}


def _by_heads(linear: Product, cut: RegionSizes, order: Order) -> Target | None:
    """Return how a linear becomes one of which each rank uses its heads; None if they are the part that it holds."""
    if cut.heads is None or not cut.by_heads:
        return None
    rows = order.rows(linear.out_features, cut.heads)
    if are_parts(rows, linear.out_features):
        return None
    # For inference alone: as for KV heads that ranks share.
    return ColumnLinear, {"used": rows, **({"in_parts": False} if cut.inference_only else {})}


def _merged(heads: Sequence[int], step: int) -> Runs:
    """Return the rows of ``heads``, of ``step`` rows each, as runs: one for heads that follow each other."""
    runs: list[tuple[int, int]] = []
    for head in heads:
        start, stop = head * step, (head + 1) * step
        if runs and runs[-1][1] == start:
            start = runs.pop()[0]
        runs.append((start, stop))
    return tuple(runs)


def _of_other_size(linear: Product, cut: RegionSizes, count: int) -> Iterator[Misfit]:
    if linear.out_features != count * cut.width:
        yield (
            f"it has out_features {linear.out_features}"
            + (f" in {count} segments" if count > 1 else "")
            + f", but {cut.row} at the end of its region has in_features {cut.width}; equal sizes are needed so that "
            "both are cut at the same places",
            "check which linears belong to this region",
        )


def _not_whole_heads(linear: Product, count: int) -> Iterator[Misfit]:
    if linear.out_features % count:
        yield (
            f"its {linear.out_features} output features are not whole heads: the configuration counts {count}",
            "check Heads(...) in the policy's checks, or unit=",
        )
