"""Norms over the features of all heads, or over all channels, of which each rank has some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.collectives import chunk_bounds, copy_to_tp, gather_from_tp, reduce_from_tp
from shardcore.comm.dtensor_params import read_partial
from shardcore.comm.exchange import misused
from shardcore.comm.parts import Runs, extent
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.layout import Layout, ReplicatedLayout
from shardcore.nn.linear.members import take_rows


class NormOverHeads(ParallelMixin):
    """A norm over queries or keys before they are viewed as heads (OLMo 2), or over the channels of an MLP (EVA-02).

    Input (..., m), the features of this rank's heads; output (..., m), each divided by the root of the mean square of
    all n features of all heads, times its weight; or what a `torch.nn.LayerNorm` makes of them. Computed in float32 at
    least. Every rank has all parameters (n), uses its part, and gradients are summed.

    What the ranks tell each other is one number for each token, the sum of squares, or the mean and the sum of squares
    around it (Chan et al. 1979); and so are their gradients: what each rank makes of them is for its own heads. A KV
    head that several ranks have is counted once.

    Options:
        eps: the attribute of the module that is its epsilon; None for a `torch.nn.LayerNorm`.
        used: the features that each rank has, by rank; by default they are cut as `torch.chunk` cuts.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"eps", "used"})

    _eps: float
    _rows: Runs
    #: Which of this rank's features count in the sum; None for all.
    _counted: Tensor | None
    #: How many features each rank has, where means are told too.
    _features: Tensor | None
    _shard_context: ShardContext

    @classmethod
    @override
    def problem(
        cls, module: nn.Module, ranks: int, *, eps: str | None = None, used: tuple[Runs, ...] = (), **options: Any
    ) -> str | None:
        if problem := super().problem(module, ranks):
            return problem
        own = sorted(name for name, p in module._parameters.items() if p is not None)
        if eps is None:
            if not isinstance(module, nn.LayerNorm) or len(module.normalized_shape) != 1 or not own:
                return f"{type(module).__name__} is no torch.nn.LayerNorm over one dim, and rms= was not said"
            if used and sum(extent(used)) != module.normalized_shape[0]:
                return "a torch.nn.LayerNorm over KV heads that several ranks have is not supported"
        elif own != ["weight"]:
            return f"{type(module).__name__} has the parameters {own}; a root-mean-square norm has a weight alone"
        elif not isinstance(getattr(module, eps, None), float):
            return f"{type(module).__name__} has no number {eps!r}, which rms= says is its epsilon"
        return misused(used or None, "features", module.get_parameter("weight").numel(), ranks)

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, **options: Any) -> Mapping[str, Layout]:
        own = [name for name, p in module._parameters.items() if p is not None]
        return dict.fromkeys(own, ReplicatedLayout(partial_gradient=True))

    @classmethod
    @override
    def plan_collectives(cls, site: Site, *, eps: str | None = None, **options: Any) -> Iterator[Collective]:
        what = "(B, S, 2) mean and sum of squares" if eps is None else "(B, S, 1) sum of squares"
        yield forward(site.path, "all_gather" if eps is None else "all_reduce", what)
        yield backward(site.path, "all_reduce", f"gradient of the {what}")
        if site.sums_at_once:
            yield backward(site.path, "all_reduce", "its weight's gradient")

    @classmethod
    @override
    def swap_class(
        cls,
        module: nn.Module,
        context: ShardContext,
        *,
        eps: str | None = None,
        used: tuple[Runs, ...] = (),
        **options: Any,
    ) -> Self:
        new = super().swap_class(module, context)
        size = module.get_parameter("weight").numel()
        used = used or tuple((chunk_bounds(size, context.size, rank),) for rank in range(context.size))
        counted = _first_uses(used, context.rank, size)
        counted = None if counted is None else counted.to(context.device)
        features = torch.tensor(extent(used), device=context.device)
        new.__dict__.update(_rows=used[context.rank], _counted=counted, _features=features if eps is None else None)
        new.__dict__["_eps"] = getattr(module, "eps" if eps is None else eps)
        return new

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return (..., m) for (..., m)."""
        context = self._shard_context
        own = [p for p in self._parameters.values() if p is not None]
        whole = read_partial(context.channel, *own, deferred=context.defers)
        weight, *bias = (take_rows(parameter, self._rows) for parameter in whole)
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        x = self._centred(x, whole[0].numel()) if self._features is not None else self._scaled(x, whole[0].numel())
        out: Tensor = weight * x
        return (out + bias[0] if bias else out).to(hidden_states.dtype)

    def _scaled(self, x: Tensor, size: int) -> Tensor:
        squares = x.pow(2)
        if self._counted is not None:
            squares = squares * self._counted.to(x)
        channel = self._shard_context.channel.exact
        total = copy_to_tp(reduce_from_tp(squares.sum(-1, keepdim=True), channel), channel)
        return x * torch.rsqrt(total / size + self._eps)

    def _centred(self, x: Tensor, size: int) -> Tensor:
        assert self._features is not None
        channel, features = self._shard_context.channel.exact, self._features.to(x)
        mean = x.mean(-1, keepdim=True)
        told = torch.cat([mean, (x - mean).pow(2).sum(-1, keepdim=True)], -1)  # (..., 2)
        told = copy_to_tp(gather_from_tp(told, channel, -1, 2 * len(features)), channel).unflatten(-1, (-1, 2))
        means, squares = told.unbind(-1)  # each (..., ranks)
        mean = (means * features).sum(-1, keepdim=True) / size
        squares = squares + features * (means - mean).pow(2)
        return x.sub(mean) * torch.rsqrt(squares.sum(-1, keepdim=True) / size + self._eps)


def _first_uses(used: tuple[Runs, ...], rank: int, size: int) -> Tensor | None:
    """Return 1 for each feature of ``rank`` that no rank before it has, nor itself before, and 0 for the others."""
    seen = torch.zeros(size)
    own: list[Tensor] = []
    for runs in used[: rank + 1]:
        own = []
        for start, stop in runs:
            own.append(1 - seen[start:stop])
            seen[start:stop] = 1
    counted = torch.cat(own)
    return None if bool(counted.all()) else counted
