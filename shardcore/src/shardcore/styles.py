"""The words that rows of a policy are written with.

    "LlamaDecoderLayer": [
        norm("input_layernorm", "post_attention_layernorm"),
        region(enter="mlp", col=("mlp.gate_proj", "mlp.up_proj"), row="mlp.down_proj"),
    ]

All names are relative to the module that the row is listed under; ``""`` is that module itself. Sizes that leave a rank
without any element are replicated by themselves; what cannot be split otherwise is reported when the plan is compiled.
A new word is a new `shardcore.policy.Row` with a constructor here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from shardcore.nn import ColumnLinear, Replicated, RowLinear, SwappedModule, VocabEmbedding, Whole
from shardcore.nn.layout import last_rank_is_empty
from shardcore.policy import HeadCounts, Row, Scope
from shardcore.steps import GatherOutputs, OpenRegion, SetAttribute, Swap

__all__ = [
    "attribute",
    "col",
    "head",
    "local_groups",
    "local_heads",
    "norm",
    "outputs",
    "partial",
    "region",
    "replicate",
    "row",
    "vocab",
]


def vocab(*names: str, optional: bool = False) -> Row:
    """Split embeddings over their rows (vocabulary)."""
    return _Swaps(text=_text("vocab", *names), optional=optional, names=names, target=VocabEmbedding)


def col(*names: str, gather_output: bool = False, optional: bool = False) -> Row:
    """Split linears over their output features; each enters by itself, those called with one tensor share the enter.

    Prefer `region` wherever a module boundary marks the entry: it overlaps the communication.
    """
    options = (("gather_output", gather_output),)
    text = _text("col", *names, gather_output=gather_output or None)
    return _Swaps(text=text, optional=optional, names=names, target=ColumnLinear, options=options)


def row(*names: str, parallel_input: bool = True, optional: bool = False) -> Row:
    """Split linears over their input features; the outputs are summed over the ranks."""
    options = (("parallel_input", parallel_input),)
    text = _text("row", *names, parallel_input=None if parallel_input else False)
    return _Swaps(text=text, optional=optional, names=names, target=RowLinear, options=options)


def head(*names: str, optional: bool = False) -> Row:
    """Split output heads over the vocabulary; the logits are gathered."""
    return _HeadRow(text=_text("head", *names), optional=optional, names=names)


def norm(*names: str, optional: bool = False) -> Row:
    """Norms outside regions: they keep their forward, on replicated parameters."""
    return _Swaps(text=_text("norm", *names), optional=optional, names=names, target=Replicated)


def replicate(*names: str, optional: bool = False) -> Row:
    """Modules (with everything below them) or bare parameters that every rank holds whole."""
    return _ReplicateRow(text=_text("replicate", *names), optional=optional, names=names)


def partial(*names: str, optional: bool = False) -> Row:
    """Replicated modules that local heads read (norms on queries and keys): their gradients are summed."""
    options = (("partial", True),)
    return _Swaps(text=_text("partial", *names), optional=optional, names=names, target=Replicated, options=options)


def region(
    *,
    col: str | tuple[str, ...],
    row: str,
    enter: str | None = None,
    arg: str | None = None,
    kv: str | tuple[str, ...] = (),
    unit: Literal["column", "head"] = "column",
    optional: bool = False,
) -> Row:
    """A pair of column linears and a row linear between which activations are split.

    Args:
        col: linears split over their output features.
        row: the linear, split over its input features, that ends the region.
        enter: the module whose call enters the region, which must not contain the residual connection; ``None`` lets
            the column linears enter (one alone at its own call, several by the identity of their input).
        arg: the entering argument of that module's ``forward``; by default the first.
        kv: key and value linears. With fewer KV heads than ranks, neighbouring ranks share copies of a head.
        unit: what must stay whole: single columns, or attention heads as the policy's ``Heads`` check counts them.
        optional: the region may be absent.
    """
    text = _text(
        "region", enter=enter, arg=arg, col=col, kv=kv or None, row=row, unit=None if unit == "column" else unit
    )
    return _RegionRow(
        text=text, optional=optional, enter=enter, arg=arg, col=_tuple(col), kv=_tuple(kv), row=row, unit=unit
    )


def attribute(name: str, value: Any, *, optional: bool = False, literal: bool = False) -> Row:
    """Set an attribute (dots reach into submodules) to what one rank needs.

    Args:
        name: the attribute; it must exist.
        value: the new value, or a function of the `HeadCounts` such as `local_heads`.
        optional: the submodule may be absent.
        literal: a function is the value itself.
    """
    shown = value.__name__ if inspect.isfunction(value) else repr(value)
    text = f"attribute({name!r}, {shown})"
    return _AttributeRow(text=text, optional=optional, name=name, value=value, literal=literal)


def outputs(*, attentions: Literal["heads"] | None = None, optional: bool = False) -> Row:
    """Make captured outputs of the module that collects them whole again.

    Args:
        attentions: ``"heads"`` if attention weights (B, heads, S, S) hold this rank's heads only.
        optional: the module may be absent.
    """
    return _OutputsRow(text=_text("outputs", attentions=attentions), optional=optional, attentions=attentions)


def local_heads(heads: HeadCounts) -> int:
    """Query heads of one rank."""
    return heads.local_query


def local_groups(heads: HeadCounts) -> int:
    """Query heads of one rank for each KV head that it uses."""
    return heads.local_query // heads.local_kv


def _text(word: str, *names: Any, **named: Any) -> str:
    parts = [repr(n) if isinstance(n, str) else str(n) for n in names]
    parts += [f"{key}={value!r}" for key, value in named.items() if value is not None]
    return f"{word}({', '.join(parts)})"


def _tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Swaps(Row):
    """The named modules, each swapped for ``target``; one that is too small for the ranks is replicated instead."""

    names: tuple[str, ...]
    target: type[SwappedModule]
    options: tuple[tuple[str, Any], ...] = ()

    def plan(self, scope: Scope) -> None:
        for name in self.names:
            module = scope.find(name)
            if module is None:
                continue
            small = _split_size(module, self.target)
            if small is not None and last_rank_is_empty(small, scope.ranks):
                scope.swap(name, Replicated)
            else:
                scope.swap(name, self.target, **dict(self.options))


def _split_size(module: nn.Module, target: type[SwappedModule]) -> int | None:
    """Return the size that splitting ``module`` cuts, or None if nothing is cut."""
    for kind, native, size in (
        (VocabEmbedding, nn.Embedding, "num_embeddings"),
        (ColumnLinear, nn.Linear, "out_features"),
        (RowLinear, nn.Linear, "in_features"),
    ):
        if issubclass(target, kind) and isinstance(module, native):
            return int(getattr(module, size))
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class _HeadRow(Row):
    names: tuple[str, ...]

    def plan(self, scope: Scope) -> None:
        for name in self.names:
            module = scope.find(name)
            if not isinstance(module, nn.Linear):
                if module is not None:
                    scope.swap(name, ColumnLinear)  # records what is wrong with it
            elif last_rank_is_empty(module.out_features, scope.ranks):
                scope.swap(name, Replicated)
            else:
                scope.swap(name, ColumnLinear, gather_output=True, enters=False)
                path = scope.name(name)
                scope.add(OpenRegion(path=path, argument=("input", 0), members=(path,), row=None, block=path))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReplicateRow(Row):
    names: tuple[str, ...]

    def plan(self, scope: Scope) -> None:
        for name in self.names:
            owner, _, parameter = name.rpartition(".")
            if _bare_parameter(scope.module, owner, parameter):
                scope.claim(owner, parameter, Whole())
                scope.add(Swap(path=scope.name(owner), target=Replicated))
                continue
            module = scope.find(name)
            for below, submodule in module.named_modules() if module is not None else ():
                if any(p is not None for p in submodule._parameters.values()):
                    scope.swap(".".join(filter(None, (name, below))), Replicated)


def _bare_parameter(module: nn.Module, owner: str, parameter: str) -> bool:
    try:
        return module.get_submodule(owner)._parameters.get(parameter) is not None
    except AttributeError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class _RegionRow(Row):
    enter: str | None
    arg: str | None
    col: tuple[str, ...]
    kv: tuple[str, ...]
    row: str
    unit: str

    def plan(self, scope: Scope) -> None:
        found = {name: scope.find(name) for name in (*self.col, *self.kv, self.row)}
        linears = {name: m for name, m in found.items() if isinstance(m, nn.Linear)}
        for name in found.keys() - linears.keys():
            if found[name] is not None:
                scope.swap(name, ColumnLinear)  # records what is wrong with it
        if len(linears) < len(found) or not self._fits(scope, linears):
            for name, linear in linears.items():
                for parameter in linear._parameters:
                    scope.claim(name, parameter, None)  # said already: not "covered by no row" too
            return
        width = linears[self.col[0]].out_features
        if self.unit == "column" and last_rank_is_empty(width, scope.ranks):
            for name in linears:
                scope.swap(name, Replicated)
            return
        entry = self._entry(scope)
        for name in self.col:
            scope.swap(name, ColumnLinear, enters=entry is None)
        for name in self.kv:
            heads = scope.heads
            scope.swap(name, ColumnLinear, enters=entry is None, copies=heads.copies if heads else 1)
        scope.swap(self.row, RowLinear)
        if entry is not None:
            scope.add(entry)

    def _fits(self, scope: Scope, linears: dict[str, nn.Linear]) -> bool:
        """Record what does not fit together; sizes of heads were checked by the policy's ``Heads``."""
        last = linears[self.row]
        fits = True
        for name in self.col:
            if linears[name].out_features != last.in_features:
                fits = False
                scope.problem(
                    f"it has out_features {linears[name].out_features}, but {self.row} at the end of its region has "
                    f"in_features {last.in_features}; equal sizes are needed so that both are cut at the same places",
                    "check which linears belong to this region",
                    name,
                )
        if self.unit != "head" and not self.kv:
            return fits
        heads = scope.heads
        if heads is None:
            return False
        for names, count in ((self.col, heads.query), (self.kv, heads.kv)):
            for name in names:
                if linears[name].out_features % count:
                    fits = False
                    scope.problem(
                        f"its {linears[name].out_features} output features are not whole heads: the configuration "
                        f"counts {count}",
                        "check Heads(...) in the policy's checks, or unit=",
                        name,
                    )
        return fits

    def _entry(self, scope: Scope) -> OpenRegion | None:
        """Return where the region is entered, or None if its several column linears enter by themselves."""
        members = tuple(scope.name(name) for name in (*self.col, *self.kv))
        place = self.enter if self.enter is not None else self.col[0]
        if self.enter is None and len(members) > 1:
            return None
        module = scope.find(place)
        argument = None if module is None else _argument(module, self.arg)
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
        path = scope.name(place)
        return OpenRegion(path=path, argument=argument, members=members, row=scope.name(self.row), block=scope.name(""))


def _argument(module: nn.Module, name: str | None) -> tuple[str, int] | None:
    """Return name and position of an argument of ``module.forward`` (the first by default), or None."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(module.forward).parameters.values() if p.kind in kinds]
    wanted = name or (names[0] if names else None)
    return (wanted, names.index(wanted)) if wanted in names else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _AttributeRow(Row):
    name: str
    value: Any | Callable[[HeadCounts], Any]
    literal: bool = False

    def plan(self, scope: Scope) -> None:
        owner, _, name = self.name.rpartition(".")
        module = scope.find(owner)
        if module is None:
            return
        if not hasattr(module, name):
            scope.problem(
                f"{type(module).__name__} has no attribute {name!r}; setting it would create one that nothing reads",
                "remove the row, or name the attribute that this version of the model uses",
                owner,
            )
            return
        value = self.value
        if inspect.isfunction(value) and not self.literal:
            if scope.heads is None:
                return
            value = value(scope.heads)
        scope.add(SetAttribute(path=scope.name(owner), name=name, value=value))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputsRow(Row):
    attentions: str | None

    def plan(self, scope: Scope) -> None:
        if self.attentions == "heads" and "forward" in vars(scope.module):
            scope.problem(
                f"this {type(scope.module).__name__} has a forward of its own on the instance, which would be called "
                "instead of the one that gathers outputs",
                "set it on a subclass, or after shard()",
            )
        elif self.attentions == "heads" and scope.heads is not None:
            scope.add(GatherOutputs(path=scope.name(""), dims=(("attentions", 1, scope.heads.query),)))
