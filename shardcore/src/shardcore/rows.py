"""The rows that `shardcore.styles` constructs: how each word of the vocabulary is planned for one module."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from torch import nn

from shardcore.nn import ColumnLinear, Replicated, RowLinear, Split, SwappedModule, VocabEmbedding, VocabHead, Whole
from shardcore.nn.layout import last_rank_is_empty
from shardcore.policy import HeadCounts, Row, Scope
from shardcore.region_rows import argument_of, is_parameter, number_of
from shardcore.steps import (
    CallByMethods,
    FuseNorm,
    GatherOutputs,
    OpenRegion,
    SetAttribute,
    SplitLogits,
    Swap,
    TakeLoss,
)

__all__ = [
    "AttributeRow",
    "CallsRow",
    "HeadRow",
    "LayerDropRow",
    "LossRow",
    "NormRow",
    "OutputsRow",
    "RefuseRow",
    "ReplicateRow",
    "SwapRow",
    "WhenDivisibleRow",
    "per_rank",
]


def per_rank(value: int, ranks: int) -> int:
    """This rank's part of a number that the ranks divide; as the value of an `attribute`."""
    return value // ranks


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
    bias: str | None = None

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        for name in self.names:
            module = scope.find(name)
            if not isinstance(module, nn.Linear):
                if module is not None:
                    scope.swap(name, ColumnLinear)  # records what is wrong with it
                continue
            if self.bias is not None:
                self._plan_bias(scope, self.bias, module)
            if last_rank_is_empty(module.out_features, scope.ranks):
                scope.swap(name, Replicated)
            elif scope.config.inference_only:
                scope.swap(name, ColumnLinear, gather_output=True)
            else:
                target = VocabHead if scope.config.parallel_output else ColumnLinear
                scope.swap(name, target, gather_output=True, enters=False)
                path = scope.name(name)
                scope.add(OpenRegion(path=path, argument=("input", 0), members=(path,), row=None, block=path))
                if scope.config.parallel_output:
                    self._split(scope, path)

    def _split(self, scope: Scope, head: str) -> None:
        """Keep the logits split in calls of the model that takes labels, which may be above the head's owner."""
        for path, module in scope.above():
            if labels := argument_of(module, "labels"):
                scope.add(SplitLogits(path=path, labels=labels, heads=(head,), chunk=scope.config.loss_chunk_size))
                return
        what = "parallel_output=True, but no module that holds the head takes labels"
        scope.problem(what, "say parallel_output=False", head.removeprefix(f"{scope.name('')}."))

    def _plan_bias(self, scope: Scope, name: str, module: nn.Linear) -> None:
        """Let the bare parameter lie as the bias of ``module`` does: mostly both are one object."""
        owner, _, parameter = name.rpartition(".")
        if not is_parameter(scope.module, owner, parameter):
            scope.problem(f"{type(scope.module).__name__} has no parameter {name!r}", "correct bias=")
            return
        small = last_rank_is_empty(module.out_features, scope.ranks)
        scope.claim(owner, parameter, Whole() if small else Split(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateRow(Row):
    """`shardcore.styles.replicate`."""

    names: tuple[str, ...]

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        for name in self.names:
            owner, _, parameter = name.rpartition(".")
            if is_parameter(scope.module, owner, parameter):
                scope.claim(owner, parameter, Whole())
                scope.add(Swap(path=scope.name(owner), target=Replicated))
                continue
            module = scope.find(name)
            for below, submodule in module.named_modules() if module is not None else ():
                if any(p is not None for p in submodule._parameters.values()):
                    scope.swap(".".join(filter(None, (name, below))), Replicated)


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
        if value is per_rank:
            whole = getattr(module, name)
            if not isinstance(whole, Integral) or isinstance(whole, bool):
                scope.problem(
                    f"{type(module).__name__}.{name} is a {type(whole).__name__}; per_rank divides a whole number",
                    "name the attribute that counts, or give the value of one rank in place of per_rank",
                    owner,
                )
                return
            count = int(whole)
            if count % scope.ranks:
                scope.problem(
                    f"{type(module).__name__}.{name} is {count}, which {scope.ranks} ranks do not divide",
                    "use a tensor_parallel_size that divides it",
                    owner,
                )
                return
            value = per_rank(count, scope.ranks)
        elif inspect.isfunction(value) and not self.literal:
            if scope.heads is None:
                return
            value = value(scope.heads)
        scope.add(SetAttribute(path=scope.name(owner), name=name, value=value))


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputsRow(Row):
    """`shardcore.styles.outputs`."""

    by_heads: tuple[str, ...]
    by_tokens: tuple[str, ...] = ()
    places: tuple[str, ...] = ()
    heads: str | None = None

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        by_tokens = self.by_tokens if scope.config.enable_sequence_parallelism else ()
        if not self.by_heads and not by_tokens:
            return
        if "forward" in vars(scope.module):
            scope.problem(
                f"this {type(scope.module).__name__} has a forward of its own on the instance, which would be called "
                "instead of the one that gathers outputs",
                "set it on a subclass, or after shard()",
            )
            return
        dims: tuple[tuple[str, int, int], ...] = ()
        if self.by_heads:
            heads = scope.heads.query if self.heads is None and scope.heads else None
            count = heads if self.heads is None else number_of(scope, self.heads)
            if count is None:
                return
            dims = tuple((name, 1, count) for name in self.by_heads)
        scope.add(GatherOutputs(path=scope.name(""), dims=dims, by_tokens=by_tokens, places=self.places))


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRow(Row):
    """`shardcore.styles.loss`."""

    function: Callable[..., Any]
    labels: tuple[str, ...]
    logits: tuple[str, ...]

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        for name in self.labels:
            if argument_of(scope.module, name) is None:
                scope.problem(f"{type(scope.module).__name__}.forward has no argument {name!r}", "correct labels=")
                return
        scope.add(TakeLoss(path=scope.name(""), function=self.function, labels=self.labels, logits=self.logits))


@dataclass(frozen=True, slots=True, kw_only=True)
class CallsRow(Row):
    """`shardcore.styles.calls`."""

    methods: tuple[str, ...]

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        kind = type(scope.module)
        missing = [name for name in self.methods if not inspect.isfunction(getattr(kind, name, None))]
        own = [name for name in self.methods if name in vars(scope.module)]
        if missing:
            scope.problem(f"{kind.__name__} has no method {', '.join(missing)}", "correct the names")
        elif own:
            what = f"this {kind.__name__} has {', '.join(own)} on the instance, which would be called in its place"
            scope.problem(what, "set it on a subclass, or after shard()")
        else:
            scope.add(CallByMethods(path=scope.name(""), methods=self.methods))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDropRow(Row):
    """`shardcore.styles.layer_drop`."""

    name: str

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        kind, rate = type(scope.module).__name__, getattr(scope.module, self.name, None)
        if not isinstance(rate, int | float):
            scope.problem(f"{kind} has no number {self.name!r}", "correct the name")
        elif rate and (scope.config.data_parallel_size or 1) > 1 and not scope.config.inference_only:
            scope.problem(
                f"{kind}.{self.name} is {rate}: every data-parallel replica would leave out other blocks in training, "
                "while their collectives wait for the same block on all of them",
                f"set {self.name} to 0, or use tensor parallelism alone",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WhenDivisibleRow(Row):
    """`shardcore.styles.when_divisible`."""

    size: str
    row: Row
    otherwise: Row

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        size = number_of(scope, self.size)
        if size is not None:
            (self.otherwise if size % scope.ranks else self.row).plan(scope)


@dataclass(frozen=True, slots=True, kw_only=True)
class RefuseRow(Row):
    """`shardcore.styles.refuse`."""

    when: Callable[[nn.Module], bool]
    why: str
    todo: str

    def plan(self, scope: Scope) -> None:
        """See `Row.plan`."""
        if self.when(scope.module):
            scope.refuse(self.why, self.todo)
