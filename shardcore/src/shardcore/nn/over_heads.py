"""Root-mean-square norms over the features of all heads, of which each rank has some."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.collectives import copy_to_tp, reduce_from_tp
from shardcore.comm.dtensor_params import read_partial
from shardcore.comm.exchange import misused
from shardcore.comm.strided import Runs
from shardcore.mesh.context import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.costs import Collective, Site, backward, forward
from shardcore.nn.layout import Layout, ReplicatedLayout
from shardcore.nn.linear.members import take_rows


class NormOverHeads(ParallelMixin):
    """A root-mean-square norm over queries or keys before they are viewed as heads (OLMo 2).

    Input (..., m), the features of this rank's heads; output (..., m), each divided by the root of the mean square of
    all n features of all heads, times its weight. Computed in float32 at least. Every rank has the whole weight (n),
    uses its part, and gradients are summed.

    The squares are summed over the ranks with an all-reduce of one number for each token, and so are their gradients:
    what each rank makes of the sum is for its own heads. A KV head that several ranks have is counted once.

    Options:
        eps: the attribute of the module that is its epsilon.
        used: the features that each rank has, by rank.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"eps", "used"})

    weight: nn.Parameter
    _eps: float
    _rows: Runs
    #: Which of this rank's features count in the sum; None for all.
    _counted: Tensor | None
    _shard_context: ShardContext

    @classmethod
    @override
    def problem(
        cls, module: nn.Module, ranks: int, *, eps: str = "", used: tuple[Runs, ...] = (), **options: Any
    ) -> str | None:
        if problem := super().problem(module, ranks):
            return problem
        own = sorted(name for name, p in module._parameters.items() if p is not None)
        if own != ["weight"]:
            return f"{type(module).__name__} has the parameters {own}; a root-mean-square norm has a weight alone"
        if not isinstance(getattr(module, eps, None), float):
            return f"{type(module).__name__} has no number {eps!r}, which rms= says is its epsilon"
        return misused(used, "features", module.get_parameter("weight").numel(), ranks)

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, **options: Any) -> Mapping[str, Layout]:
        return {"weight": ReplicatedLayout(partial_gradient=True)}

    @classmethod
    @override
    def plan_collectives(cls, site: Site, **options: Any) -> Iterator[Collective]:
        yield forward(site.path, "all_reduce", "(B, S, 1) sum of squares")
        yield backward(site.path, "all_reduce", "(B, S, 1) gradient of the sum of squares")
        if site.sums_at_once:
            yield backward(site.path, "all_reduce", "its weight's gradient")

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, eps: str = "", used: tuple[Runs, ...] = (), **options: Any
    ) -> Self:
        new = super().swap_class(module, context)
        counted = _first_uses(used, context.rank, new.weight.numel())
        counted = None if counted is None else counted.to(context.device)
        new.__dict__.update(_eps=getattr(module, eps), _rows=used[context.rank], _counted=counted)
        return new

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return (..., m) for (..., m)."""
        context = self._shard_context
        (whole,) = read_partial(context.channel, self.weight, deferred=context.defers)
        weight = take_rows(whole, self._rows)
        x = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        squares = x.pow(2)
        if self._counted is not None:
            squares = squares * self._counted.to(x)
        channel = context.channel.exact
        total = copy_to_tp(reduce_from_tp(squares.sum(-1, keepdim=True), channel), channel)
        return (weight * (x * torch.rsqrt(total / whole.numel() + self._eps))).to(hidden_states.dtype)


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
