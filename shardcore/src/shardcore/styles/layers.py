"""Words for single modules: split over the ranks, or replicated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from typing_extensions import override

from shardcore.nn import ColumnLinear, ParallelMixin, Replicated, ReplicatedLayout, RowLinear, VocabEmbedding
from shardcore.nn.layout import last_rank_is_empty
from shardcore.nn.linear.alike import product_of
from shardcore.nn.linear.native import ParallelLinear
from shardcore.plan.steps import FuseNorm, Swap
from shardcore.policy import Rule, Scope
from shardcore.styles._finding import is_parameter
from shardcore.styles._text import written

__all__ = ["SwapRule", "col", "norm", "partial", "replicate", "row", "vocab"]


def vocab(*names: str, optional: bool = False) -> Rule:
    """Split embeddings over the vocabulary, the rows of their weights."""
    return SwapRule(text=written("vocab", *names), optional=optional, names=names, target=VocabEmbedding)


def col(*names: str, gather_output: bool = False, optional: bool = False) -> Rule:
    """Split linears over their output features; each enters a region by itself, with an all-reduce of its own.

    Prefer `region` wherever a module boundary marks the entry: it sums the input gradients of all its linears at once,
    and overlaps the communication.
    """
    options = (("gather_output", gather_output),)
    text = written("col", *names, gather_output=gather_output or None)
    return SwapRule(text=text, optional=optional, names=names, target=ColumnLinear, options=options)


def row(*names: str, parallel_input: bool = True, optional: bool = False) -> Rule:
    """Split linears over their input features; the outputs are summed over the ranks."""
    options = (("parallel_input", parallel_input),)
    text = written("row", *names, parallel_input=None if parallel_input else False)
    return SwapRule(text=text, optional=optional, names=names, target=RowLinear, options=options)


def norm(*names: str, rms: str | None = None, optional: bool = False) -> Rule:
    """Norms outside regions: their parameters are replicated, their forward stays.

    Args:
        *names: the norms.
        rms: the attribute with epsilon, if the norms are root-mean-square norms written out in Python (``weight * x /
            sqrt(mean(x**2) + eps)``): ``enable_fused_normalization`` then runs torch's fused one.
        optional: they may be absent.
    """
    return NormRule(text=written("norm", *names, rms=rms), optional=optional, names=names, rms=rms)


def replicate(*names: str, optional: bool = False) -> Rule:
    """Replicate modules (with everything below them) or bare parameters on every rank."""
    return ReplicateRule(text=written("replicate", *names), optional=optional, names=names)


def partial(*names: str, optional: bool = False) -> Rule:
    """Replicated modules or bare parameters inside of regions: gradients are partial there, so they are summed.

    For norms on queries and keys, learned activations, norms between the entry of a region and its column linears, and
    tables that all local heads read. If a region is entered at the named module, the parameters that the module owns
    itself are meant.
    """
    return PartialRule(text=written("partial", *names), optional=optional, names=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapRule(Rule):
    """The named modules, each swapped for ``target``; too small to give every rank a part, it is replicated instead."""

    names: tuple[str, ...]
    target: type[ParallelMixin]
    options: tuple[tuple[str, Any], ...] = ()

    @override
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


def _split_size(module: nn.Module, target: type[ParallelMixin]) -> int | None:
    """Return the size that splitting ``module`` cuts, or None if nothing is cut."""
    if issubclass(target, VocabEmbedding):
        return module.num_embeddings if isinstance(module, nn.Embedding) else None
    if not issubclass(target, ParallelLinear) or isinstance(product := product_of(module), str):
        return None
    return product.in_features if issubclass(target, RowLinear) else product.out_features


@dataclass(frozen=True, slots=True, kw_only=True)
class NormRule(Rule):
    """`shardcore.styles.norm`."""

    names: tuple[str, ...]
    rms: str | None = None

    @override
    def plan(self, scope: Scope) -> None:
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
            scope.problem(what, "remove rms= from the rule", name)
        elif self.rms:
            scope.problem(f"{type(module).__name__} has no attribute {self.rms!r}", "correct rms=", name)
        elif scope.config.enable_fused_normalization is True:
            scope.problem(
                f"enable_fused_normalization=True, but no fused form of {type(module).__name__} is known",
                "say enable_fused_normalization='auto' (or False), or rms= in the rule if it is such a norm",
                name,
            )


def _has_a_weight_only(module: nn.Module) -> bool:
    return {name for name, p in module._parameters.items() if p is not None} == {"weight"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRule(Rule):
    """`shardcore.styles.partial`."""

    names: tuple[str, ...]

    @override
    def plan(self, scope: Scope) -> None:
        for name in self.names:
            owner, _, parameter = name.rpartition(".")
            if is_parameter(scope.module, owner, parameter):
                scope.swap(owner, Replicated, partial=True, names=(parameter,))
            elif scope.find(name) is not None:
                scope.swap(name, Replicated, partial=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicateRule(Rule):
    """`shardcore.styles.replicate`."""

    names: tuple[str, ...]

    @override
    def plan(self, scope: Scope) -> None:
        for name in self.names:
            owner, _, parameter = name.rpartition(".")
            if is_parameter(scope.module, owner, parameter):
                scope.claim(owner, parameter, ReplicatedLayout())
                scope.add(Swap(path=scope.name(owner), target=Replicated))
                continue
            module = scope.find(name)
            for below, submodule in module.named_modules() if module is not None else ():
                if any(p is not None for p in submodule._parameters.values()):
                    scope.swap(".".join(filter(None, (name, below))), Replicated)
