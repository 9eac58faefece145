"""The words for a region that was found in a block."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor

from shardcore_scaffold.dependence import made_of
from shardcore_scaffold.draft import called, names_in
from shardcore_scaffold.facts import KV, LISTS, QUERY, Facts, common, number, rms_eps
from shardcore_scaffold.structure import Column, Region, Split

_KEYS = re.compile("kv|key_value")  # of attributes that count their heads
_ROLES = '("query", "key", "value")'


@dataclass
class Worded:
    """A region in words.

    Attributes:
        rules: (word, rule) for the class of its block, ``place``.
        covered: names, from the block, of what these rules are for.
        split: parameters outside of the block of which it reads the entries of its heads.
        partial: parameters outside of the block that all its heads read.
    """

    region: Region
    place: str
    rules: list[tuple[str, str]] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)
    split: list[Split] = field(default_factory=list)
    partial: list[str] = field(default_factory=list)

    def named(self, rule: str) -> list[str]:
        """Return what is covered that a rule names."""
        return [name for name in self.covered if f'"{name}"' in rule]


@dataclass
class _Entry:
    """Where a region is entered."""

    module: str = ""  # whose call enters it; empty where each column linear enters by itself
    at: list[str] = field(default_factory=list)  # linears inside of it whose outputs enter in place of its argument
    after: list[str] = field(default_factory=list)  # what acts on the row linear's output inside of it


def worded(facts: Facts, place: str, region: Region, *, entered: bool | None = False) -> Worded | str:
    """Return a region as rules for the block at ``place``, or why there are no words for it.

    A region of heads that is ``entered`` names the module that enters, also where one column linear could by itself;
    with None each column linear enters by itself, if it can.
    """
    key = (place, region.row, entered)
    if key not in facts.said:
        facts.said[key] = _Wording(facts, place, region, entered=entered).words()
    found: Worded | str = facts.said[key]
    return found


class _Wording:
    def __init__(self, facts: Facts, place: str, region: Region, *, entered: bool | None) -> None:
        self.facts, self.dependence, self.modules = facts, facts.dependence, facts.modules
        self.place, self.region, self.entered = place, region, entered
        self.by_heads = region.width > 1
        self.names = [column.name for column in region.columns]
        self.counted = facts.counts(region)
        self.heads = self._own_count() if self.by_heads and not self.counted else ""

    def words(self) -> Worded | str:
        """Return the rules."""
        region, found = self.region, Worded(self.region, self.place)
        if self.by_heads and not self.counted and not self.heads:
            return f"no attribute counts its {region.units} heads"
        columns: list[str] = []
        kv: list[str] = []
        for column in region.columns:
            text, is_kv = self._column(column)
            if not text:
                return f"there is no word for the order of the features of {self._short(column.name)}"
            (kv if is_kv else columns).append(text)
        if not columns:
            return "it has keys and values only"
        cuts = self._cuts()
        entry = self._entry()
        if region.past and not entry.at:
            return f"{self._short(region.past[0])} is read by all heads, past its column linears"
        found.partial = [name for name in region.partial if not name.startswith(f"{self.place}.")]
        partial = self._partial(entry)
        inside = [name for name in partial if entry.module and f"{self.place}.{name}" in self.modules]
        found.rules = [("slice_arg", text) for _, text in cuts]
        found.rules.append(
            (
                "region",
                called(
                    "region",
                    enter=_all(self._shorts(entry.at)) or _one(self._short(entry.module)),
                    col=names_in(columns),
                    kv=names_in(kv),
                    row=_one(self._short(region.row)),
                    unit='"head"' if self.by_heads and not self.heads else "",
                    heads=_one(self.heads),
                    partial=_all(inside),
                    after=_all(self._shorts(entry.after)),
                ),
            )
        )
        if apart := [name for name in partial if name not in inside]:  # parameters, which no module holds alone
            found.rules.append(("partial", f"partial({', '.join(map(_one, apart))}),"))
        found.covered = {*self._shorts([*self.names, region.row, *entry.after]), *partial}
        for split in region.split:
            if split.name.startswith(f"{self.place}."):
                (name,) = self._shorts(self.facts.as_modules([split.name]))
                found.rules.append(("by_heads", f'by_heads("{name}"{f", dim={split.dim}" if split.dim else ""}),'))
                found.covered.add(name)
            else:
                found.split.append(split)  # or in another block, which hands on what it makes of it
        for norm, linear in self.facts.norms.items():
            if linear in self.names:
                if not self.counted:
                    return f"{self._short(norm)} is over all heads, which no check counts"
                of = ', of="key"' if _one(self._short(linear)) in kv else ""
                eps = rms_eps(self.modules[norm])
                found.rules.append(("norm_over_heads", f'norm_over_heads("{self._short(norm)}", rms="{eps}"{of}),'))
                found.covered.add(self._short(norm))
        found.rules += self._numbers() if self.by_heads else []
        return found

    def _short(self, name: str) -> str:
        return name[len(self.place) + 1 :]

    def _shorts(self, names: list[str]) -> list[str]:
        return [self._short(name) for name in names]

    def _own_count(self) -> str:
        """Return the attribute, from the block, that counts the units of the region; one of its configuration last."""
        above = common([*self.names, self.region.row])
        holders = [path for path in self.modules if path == above or path.startswith(f"{above}.")]
        for path in sorted(holders, key=len):
            numbers = {name: n for name, n in vars(self.modules[path]).items() if "head" in name and "dim" not in name}
            own = [name for name, n in numbers.items() if type(n) is int and n == self.region.units]
            if own:  # in other blocks several heads may share a key
                return self._short(f"{path}.{min(own, key=lambda name: not _KEYS.search(name))}")
        config = getattr(self.modules[above], "config", None)
        names = [f"config.{name}" for name in (*KV, *QUERY) if number(config, name) == self.region.units]
        read = {name: n for name, n in self.facts.numbers.get(above, {}).items() if "." not in name and n > 1}
        names += [name for name, n in read.items() if n == self.region.units]  # by a name that says nothing
        return next((self._short(f"{above}.{name}") for name in names), "")

    def _column(self, column: Column) -> tuple[str, bool]:
        """Return what ``col=`` or ``kv=`` says of a column linear, if anything can, and whether it is ``kv=``."""
        plain, width = _one(self._short(column.name)), self.region.width
        groups = self.facts.groups if self.counted else 1
        head, uneven = divmod(width, groups)
        equal = len(set(column.sizes)) == 1
        match column.runs:
            case 0:
                return "", False
            case 1 if not self.by_heads:
                return (plain if column.each == 1 else ""), False
            case 1 if groups > 1 and not uneven and column.each == head:
                return plain, True
            case 1 if groups > 1 and not uneven and column.each == width + 2 * head:
                return f'segments({plain}, {_ROLES}, by="group")', False
            case 1:
                times, rest = divmod(column.each, width)
                text = f'segments({plain}, {times}, by="head")' if times > 1 and not rest else plain
                return (text if column.each % groups == 0 else ""), False
            case 3 if groups > 1:
                fits = not uneven and column.sizes == (width, head, head)
                return (f"segments({plain}, {_ROLES})" if fits else ""), False
            case _:
                fits = groups == 1 and equal and column.sizes[0] == width
                return (f"segments({plain}, {column.runs})" if fits else ""), False

    def _entry(self) -> _Entry:
        """Return where the region is entered."""
        region = self.region
        above = common([*self.names, *region.past])
        while above != self.place and isinstance(self.modules[above], LISTS):
            above = above.rpartition(".")[0]
        inside = [name for name in self.dependence.linears if name.startswith(f"{above}.")]
        if region.past and self._made_inside(above):
            fed = {s for name in self.names for s in self.dependence.reads[name] if s in inside}
            single = [name for name in self.names if not self.dependence.reads[name] & fed]
            return _Entry(above, [*sorted({*fed, *region.past}), *single])
        alone = len(self.names) == 1 and not (self.entered and self.by_heads)
        if self.entered is None or alone or above == self.place or above in self.dependence.residual:
            return _Entry()
        entry, arguments = _Entry(above), {**self.dependence.arguments.get(above, {})}
        first = arguments.pop(self.dependence.first[above], [])
        twice = any(_same(one, other) for given in arguments.values() for one in given for other in first)
        if twice or not self._made_inside(above):  # it arrives under several names
            return _Entry()
        inputs = [self.dependence.linears[name].inputs for name in self.names]
        enters = all(len(given) == len(first) and all(map(_same, given, first)) for given in inputs)
        if not enters or any(name != region.row and name not in self.names for name in inside):
            return _Entry()
        norms = {f"{norm}.weight" for norm, linear in self.facts.norms.items() if linear in self.names}
        known = {*region.partial, *(split.name for split in region.split), *norms}
        rest = [
            name
            for name, _ in self.facts.model.named_parameters()
            if name.startswith(f"{above}.")
            and name not in known
            and name.rpartition(".")[0] not in self.dependence.linears
        ]
        if rest and not region.row.startswith(f"{above}."):
            return _Entry()
        entry.after = self.facts.as_modules(rest)
        return entry

    def _arguments(self, module: str) -> Iterator[tuple[str, set[str], list[Tensor]]]:
        """Yield the arguments but the first that heads depend on: name, what it is made of, pattern of each dim."""
        parameters = [(name, p) for name, p in self.facts.model.named_parameters() if p.requires_grad]
        leaves: list[tuple[str, Tensor]] = [*parameters]
        leaves += [(name, leaf) for name, linear in self.dependence.linears.items() for leaf in linear.outputs]
        for name, tensors in self.dependence.arguments.get(module, {}).items():
            if name != self.dependence.first[module] and len({tensor.shape for tensor in tensors}) == 1:
                patterns = self.dependence.patterns(self.region.row, self.region.labels, tensors)
                if any(bool(pattern.any()) for pattern in patterns):
                    yield name, made_of(tensors, leaves), patterns

    def _made_inside(self, module: str) -> bool:
        """Tell whether what arrives beside is made of the region's own parameters, so that none of it has to enter."""
        own = {split.name for split in self.region.split}
        return all(made <= own for _, made, _ in self._arguments(module))

    def _cuts(self) -> list[tuple[str, str]]:
        """Return the arguments that hold all heads and are made of no parameters, with a rule that cuts each."""
        where = common(self.names)
        found = []
        for name, made, patterns in self._arguments(where) if self.by_heads else ():
            dims = [dim for dim, pattern in enumerate(patterns) if self.region.belongs(pattern, repeated=True)]
            if dims and not made:
                of = f', heads="{self.heads}"' if self.heads else ""
                at = dims[0] - len(patterns)
                found.append((name, f'slice_arg("{self._short(where)}", "{name}", {at}{of}),'))
        return found

    def _partial(self, entry: _Entry) -> list[str]:
        """Return what every rank applies to its heads, named from the block."""
        names = {name for name in self.region.partial if name.startswith(f"{self.place}.")}
        for column in self.names if entry.at else ():
            reads = self.dependence.reads[column]
            if reads & set(entry.at):
                names |= reads - self.dependence.linears.keys()
        return self._shorts(self.facts.as_modules(names))

    def _numbers(self) -> list[tuple[str, str]]:
        """Return a rule for each number that the forward reads and of which a rank has a part."""
        region, groups = self.region, self.facts.groups if self.counted else 1
        above = common(self.names)
        widths = {region.units * region.width, *(region.units * column.each for column in region.columns)}
        widths -= {region.units, region.width, *(column.each for column in region.columns)}
        rules: dict[tuple[str, str], None] = {}
        for path, numbers in self.facts.numbers.items():
            between = path != self.place and path.startswith(f"{self.place}.") and above.startswith(f"{path}.")
            for name, value in numbers.items() if path == above or between else ():
                where = self._short(f"{path}.{name}")
                if groups > 1 and "group" in name and value == groups:
                    rules["local_groups", f'attribute("{where}", local_groups),'] = None
                elif groups > 1 and value == region.units and _KEYS.search(name):
                    rules["local_kv_heads", f'attribute("{where}", local_kv_heads),'] = None
                elif self._counts(name, value) or value in widths or where == self.heads:
                    rules["per_rank", f'attribute("{where}", per_rank),'] = None
        return list(rules)

    def _counts(self, name: str, value: int) -> bool:
        """Tell whether a number counts heads: those of the configuration, or any among which a unit is divided."""
        units, width = self.region.units, self.region.width
        if "head" not in name or "dim" in name or self.counted or value <= units:
            groups = self.facts.groups if self.counted else 1
            return "head" in name and "dim" not in name and value in {units * groups, units}
        return "size" not in name and units * width % value == value % units == 0


def _one(name: str) -> str:
    return f'"{name}"' if name else ""


def _all(names: list[str]) -> str:
    return names_in([_one(name) for name in names])


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
