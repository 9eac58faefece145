"""The column linears of a region: what each of them computes, and so how it is cut.

A column linear is split over its output features, and the region's row linear over its input features. Both have to be
cut at the same places. What that asks of a linear depends on what it computes: one projection, several, or the keys
that ranks share. Each kind is a small class that says what does not fit, and by which parallel module it is split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from shardcore.nn import ColumnLinear, FusedColumnLinear, SwappedModule
from shardcore.policy import HeadCounts

__all__ = ["Column", "Cut", "Fused", "KeyValue", "Projection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
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


#: What does not fit, and what to do about it.
Misfit = tuple[str, str]
#: A parallel module and its options.
Target = tuple[type[SwappedModule], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Column(ABC):
    """One column linear of a region, by its name."""

    name: str

    def without(self, cut: Cut) -> Misfit | None:
        """Return what the region lacks for a column of this kind, whatever its sizes, or None."""
        return None

    @abstractmethod
    def misfits(self, linear: nn.Linear, cut: Cut) -> Iterator[Misfit]:
        """Yield what does not fit between the linear and the rest of the region."""

    @abstractmethod
    def target(self, linear: nn.Linear, cut: Cut) -> Target:
        """Return what the linear becomes. Precondition: it fits."""


@dataclass(frozen=True, slots=True)
class Projection(Column):
    """One projection, as wide as the input of the row linear."""

    @override
    def misfits(self, linear: nn.Linear, cut: Cut) -> Iterator[Misfit]:
        yield from _of_other_size(linear, cut, 1)
        if cut.by_heads and cut.heads is not None:
            yield from _not_whole_heads(linear, cut.heads.query)

    @override
    def target(self, linear: nn.Linear, cut: Cut) -> Target:
        return ColumnLinear, {}


@dataclass(frozen=True, slots=True)
class KeyValue(Column):
    """Keys or values. With fewer KV heads than ranks, neighbouring ranks compute the same head."""

    @override
    def misfits(self, linear: nn.Linear, cut: Cut) -> Iterator[Misfit]:
        if cut.heads is not None:
            yield from _not_whole_heads(linear, cut.heads.kv)

    @override
    def target(self, linear: nn.Linear, cut: Cut) -> Target:
        options: dict[str, Any] = {"replication": cut.heads.kv_replication if cut.heads else 1}
        if cut.inference_only and options["replication"] > 1:
            # No optimizer state to save: a collective less for each token is worth more.
            options["in_parts"] = False
        return ColumnLinear, options


@dataclass(frozen=True, slots=True)
class Fused(Column):
    """`shardcore.styles.segments`."""

    segments: int
    by: str = "projection"

    def __repr__(self) -> str:
        by = "" if self.by == "projection" else f", by={self.by!r}"
        return f"segments({self.name!r}, {self.segments}{by})"

    @override
    def without(self, cut: Cut) -> Misfit | None:
        if self.by == "head" and not cut.by_heads:
            return "segments in the order of heads are cut between heads", 'say unit="head" or heads='
        return None

    @override
    def misfits(self, linear: nn.Linear, cut: Cut) -> Iterator[Misfit]:
        yield from _of_other_size(linear, cut, self.segments)
        if cut.by_heads and cut.heads is not None:
            yield from _not_whole_heads(linear, cut.heads.query)

    @override
    def target(self, linear: nn.Linear, cut: Cut) -> Target:
        if self.by == "head":  # head after head: cut between heads, like a linear that computes one projection
            return ColumnLinear, {}
        return FusedColumnLinear, {"segments": self.segments}


def _of_other_size(linear: nn.Linear, cut: Cut, count: int) -> Iterator[Misfit]:
    if linear.out_features != count * cut.width:
        yield (
            f"it has out_features {linear.out_features}"
            + (f" in {count} segments" if count > 1 else "")
            + f", but {cut.row} at the end of its region has in_features {cut.width}; equal sizes are needed so that "
            "both are cut at the same places",
            "check which linears belong to this region",
        )


def _not_whole_heads(linear: nn.Linear, count: int) -> Iterator[Misfit]:
    if linear.out_features % count:
        yield (
            f"its {linear.out_features} output features are not whole heads: the configuration counts {count}",
            "check Heads(...) in the policy's checks, or unit=",
        )
