"""The rows that `shardcore.styles` constructs: how each word of the vocabulary is planned for one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from shardcore.nn import ColumnLinear, Replicated, RowLinear, SwappedModule, VocabEmbedding, Whole
from shardcore.nn.layout import last_rank_is_empty
from shardcore.policy import HeadCounts, Row, Scope
from shardcore.steps import FuseNorm, GatherOutputs, OpenRegion, SetAttribute, Swap

__all__ = ["AttributeRow", "HeadRow", "NormRow", "OutputsRow", "RegionRow", "ReplicateRow", "SwapRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRow(Row):
    """The named modules, each swapped for ``target``; one that is too small for the ranks is replicated instead."""

    names: tuple[str, ...]
    target: type[SwappedModule]
    options: tuple[tuple[str, Any], ...] = ()

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        for name in self.names:
            module = scope.find(name)
            if module is None:
                continue
            small = _split_size(module, self.target)
            if small is not None and last_rank_is_empty(small, scope.ranks):
                scope.swap(name, Replicated)
            else:
                scope.swap(name, self.target, **dict(self.options))


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRow(Row):
    """`shardcore.styles.norm`."""

    names: tuple[str, ...]
    rms: str | None = None

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        for name in self.names:
            module = scope.find(name)
            if module is None:
                continue
            used = scope.swap(name, Replicated)
            # A norm that a pack brings is fused in its own way.
            if scope.config.enable_fused_normalization and (used is Replicated or scope.ranks == 1):
                self._fuse(scope, name, module)

    def _fuse(self, scope: Scope, name: str, module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm | nn.RMSNorm | nn.GroupNorm):
            return  # torch's own, which is fused
        if self.rms and hasattr(module, self.rms) and _has_a_weight_only(module):
            scope.add(FuseNorm(path=scope.name(name), eps=self.rms))
        elif self.rms and hasattr(module, self.rms):
            own = ", ".join(sorted(name for name, p in module._parameters.items() if p is not None)) or "none"
            what = f"{type(module).__name__} has the parameters {own}; a root-mean-square norm has a weight alone"
            scope.problem(what, "remove rms= from the row", name)
        elif self.rms:
            scope.problem(f"{type(module).__name__} has no attribute {self.rms!r}", "correct rms=", name)
        elif scope.config.enable_fused_normalization is True:
            scope.problem(
                f"enable_fused_normalization=True, but no fused form of {type(module).__name__} is known",
                "say enable_fused_normalization='auto' (or False), or rms= in the row if it is such a norm",
                name,
            )


def _has_a_weight_only(module: nn.Module) -> bool:
    return {name for name, p in module._parameters.items() if p is not None} == {"weight"}


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
class HeadRow(Row):
    """`shardcore.styles.head`."""

    names: tuple[str, ...]

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        for name in self.names:
            module = scope.find(name)
            if not isinstance(module, nn.Linear):
                if module is not None:
                    scope.swap(name, ColumnLinear)  # records what is wrong with it
            elif last_rank_is_empty(module.out_features, scope.ranks):
                scope.swap(name, Replicated)
            elif scope.config.inference_only:
                scope.swap(name, ColumnLinear, gather_output=True)
            else:
                scope.swap(name, ColumnLinear, gather_output=True, enters=False)
                path = scope.name(name)
                scope.add(OpenRegion(path=path, argument=("input", 0), members=(path,), row=None, block=path))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateRow(Row):
    """`shardcore.styles.replicate`."""

    names: tuple[str, ...]

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
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
class RegionRow(Row):
    """`shardcore.styles.region`."""

    enter: str | None
    arg: str | None
    col: tuple[str, ...]
    kv: tuple[str, ...]
    row: str
    unit: str

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
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
        """Return where the region is entered, or None if its several column linears enter by themselves.

        Without a backward there is nothing to do at the entry; linears that enter by themselves cost nothing then, and
        are right if somebody asks for a gradient all the same.
        """
        members = tuple(scope.name(name) for name in (*self.col, *self.kv))
        place = self.enter if self.enter is not None else self.col[0]
        if self.enter is None and len(members) > 1:
            return None
        if scope.config.inference_only:
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
class AttributeRow(Row):
    """`shardcore.styles.attribute`."""

    name: str
    value: Any | Callable[[HeadCounts], Any]
    literal: bool = False

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
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
class OutputsRow(Row):
    """`shardcore.styles.outputs`."""

    attentions: str | None

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        if self.attentions == "heads" and "forward" in vars(scope.module):
            scope.problem(
                f"this {type(scope.module).__name__} has a forward of its own on the instance, which would be called "
                "instead of the one that gathers outputs",
                "set it on a subclass, or after shard()",
            )
        elif self.attentions == "heads" and scope.heads is not None:
            scope.add(GatherOutputs(path=scope.name(""), dims=(("attentions", 1, scope.heads.query),)))
