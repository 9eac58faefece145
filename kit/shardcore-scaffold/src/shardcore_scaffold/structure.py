"""Which pairs of linears can be split over ranks, and what lies between them: read off what depends on what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardcore_scaffold.dependence import Dependence, Source


@dataclass(frozen=True)
class Column:
    """A column linear of a region.

    Attributes:
        name: its path.
        each: how many of its output features belong to each unit.
        runs: in how many runs of consecutive features those of a unit lie, the same distance apart: 1 where one unit
            follows the other, 2 for a fused gate and up projection; 0 for any other order.
        sizes: how long each of these runs is.
    """

    name: str
    each: int
    runs: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A parameter whose entries along a dim belong to units."""

    name: str
    dim: int


@dataclass
class Region:
    """Column linears and the row linear that follows them.

    Attributes:
        row: the path of the row linear.
        columns: the column linears.
        units: in how many groups of features, none of which has anything to do with the others, it falls.
        width: the input features of the row linear for each unit.
        partial: parameters that all units read.
        split: parameters of which each unit reads its own entries.
        past: linears that are read by units without being split, by all of them.
        labels: the unit of each input feature of the row linear.
    """

    row: str
    columns: list[Column]
    units: int
    width: int
    partial: list[str] = field(default_factory=list)
    split: list[Split] = field(default_factory=list)
    past: list[str] = field(default_factory=list)
    labels: Tensor = field(default_factory=lambda: torch.zeros(0))

    def belongs(self, pattern: Tensor, *, repeated: bool = False) -> bool:
        """Tell whether the entries along a dim are those of the units, in their order.

        Args:
            pattern: (input features of the row linear, entries).
            repeated: the entries are those of all units several times, the units innermost.
        """
        owners = _owners(pattern, self.labels, self.units)
        if owners is None or len(owners) % self.units:
            return False
        each = len(owners) // self.units
        order = torch.arange(self.units)
        return bool((owners == (order.repeat(each) if repeated else order.repeat_interleave(each))).all())


def regions_of(dependence: Dependence, linears: Sequence[str]) -> tuple[list[Region], dict[str, str]]:
    """Return the regions among ``linears``, none of which is in two, and why others are none.

    Args:
        dependence: what depends on what.
        linears: the paths of linears that may be split.
    """
    allowed, found, reasons = set(linears), [], {}
    for row in linears:
        if not dependence.reads.get(row, set()) & allowed:
            continue
        region = _region(dependence, row, allowed)
        if isinstance(region, Region):
            found.append(region)
        else:
            reasons[row] = region
    taken: set[str] = set()
    chosen = []
    # What several linears make is rather a region than a chain of two in a row.
    for region in sorted(found, key=lambda region: -len(region.columns)):
        members = {region.row, *(column.name for column in region.columns)}
        if taken.isdisjoint(members | set(region.past)):
            taken |= members | set(region.past)
            chosen.append(region)
    chosen.sort(key=lambda region: linears.index(region.row))
    inside = {region.row for region in chosen}
    for region in list(chosen):
        shared = [
            name
            for name in (*region.partial, *(split.name for split in region.split))
            if not dependence.readers(name) <= inside
        ]
        if shared:
            reasons[region.row] = f"{shared[0]} is read inside and outside"
            chosen.remove(region)
    return chosen, reasons


def _region(dependence: Dependence, row: str, allowed: set[str]) -> Region | str:
    reads = dependence.reads[row]
    names = {n: n in allowed and dependence.readers(n) == {row} for n in dependence.linears if n in reads}
    past = [name for name, is_own in names.items() if not is_own]
    if len(past) == len(names):
        return "what it is made of is read elsewhere too"
    own = dependence.sources(row, [name for name in names if names[name]])
    labels = _units([s.pattern for s in own])
    if own and _count(labels) == 1 and len(own) > 1:
        for left in own:
            rest = [s for s in own if s is not left]
            without = _units([s.pattern for s in rest])
            if _count(without) > 1:
                own, past, labels = rest, [*past, left.name], without
                break
    units = _count(labels)
    if not own or units == 1:
        return "all of its input features depend on each other"
    width, uneven = divmod(len(labels), units)
    if uneven or any(int((labels == unit).sum()) != width for unit in range(units)):
        return "its input features fall into groups of unequal size"
    columns = []
    for source in own:
        column = _column(source, labels, units)
        if column is None:
            return f"the output features of {source.name} do not fall into groups of equal size"
        columns.append(column)
    region = Region(row, columns, units, width, past=past, labels=labels)
    asked = dependence.parameters(row, labels, sorted(reads - names.keys()))
    for name in dict.fromkeys(name for name, _ in asked):
        dim = next((dim for (own_name, dim), p in asked.items() if own_name == name and region.belongs(p)), None)
        if dim is None:
            region.partial.append(name)
        else:
            region.split.append(Split(name, dim))
    return region


def _units(patterns: Sequence[Tensor]) -> Tensor:
    """Return a number for each input feature, the same for those that depend on a common output feature."""
    if not patterns:
        return torch.zeros(0, dtype=torch.long)
    together = torch.cat(list(patterns), dim=1)
    parent = list(range(together.shape[0]))

    def root(at: int) -> int:
        while parent[at] != at:
            parent[at] = parent[parent[at]]
            at = parent[at]
        return at

    for column in together.T:
        touched = column.nonzero().flatten().tolist()
        for other in touched[1:]:
            parent[root(other)] = root(touched[0])
    numbers: dict[int, int] = {}
    return torch.tensor([numbers.setdefault(root(at), len(numbers)) for at in range(len(parent))])


def _count(labels: Tensor) -> int:
    return int(labels.max()) + 1 if labels.numel() else 0


def _owners(pattern: Tensor, labels: Tensor, units: int) -> Tensor | None:
    """Return the unit that each output feature belongs to, or None if one belongs to several, or to none."""
    touches = torch.stack([pattern[labels == unit].any(0) for unit in range(units)])
    return touches.int().argmax(0) if bool((touches.sum(0) == 1).all()) else None


def _column(source: Source, labels: Tensor, units: int) -> Column | None:
    owners = _owners(source.pattern, labels, units)
    if owners is None:
        return None
    each, rest = divmod(len(owners), units)
    places = [(owners == unit).nonzero().flatten() for unit in range(units)]
    if rest or any(len(at) != each for at in places):
        return None
    breaks = (places[0].diff() != 1).nonzero().flatten() + 1
    sizes = torch.tensor([0, *breaks.tolist(), each]).diff()
    # Units follow each other in each run.
    starts = places[0][torch.tensor([0, *breaks.tolist()])]
    inside = torch.cat([torch.arange(int(n)) for n in sizes])
    run = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    regular = all(bool((at == starts[run] + unit * sizes[run] + inside).all()) for unit, at in enumerate(places))
    return Column(source.name, each, len(sizes) if regular else 0, tuple(sizes.tolist()))
