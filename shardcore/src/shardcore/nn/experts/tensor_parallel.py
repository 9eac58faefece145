"""Modules of a mixture of experts whose parameters are parts: each rank has a slice of every expert."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from shardcore.comm.collectives import chunk_bounds
from shardcore.comm.dtensor_params import expect_dtensor, read_local
from shardcore.comm.strided import install, torch_lacks
from shardcore.mesh.context import ShardContext
from shardcore.nn.layout import Layout, SegmentedLayout, ShardedLayout, last_rank_is_empty
from shardcore.nn.replicated import HeadParameters


class Cut(NamedTuple):
    """How one parameter is split.

    Attributes:
        parameter: its name in its module.
        dim: the dim that is split.
        segments: the equal segments of that dim, each of which is split by itself: 2 for [gate|up].
        unit: so many entries in a row stay together: 2 where gate and up take turns.
        filled: the module gets all entries, of which those of other ranks are zero: a bias of what is summed.
    """

    parameter: str
    dim: int
    segments: int = 1
    unit: int = 1
    filled: bool = False


_LINE = 16  # bytes, of which torch's grouped products want rows to be a multiple


class ExpertTensorParallel(HeadParameters):
    """A native module that runs its own forward on this rank's parts of its parameters.

    Its input is the same on all ranks, and its output is whatever the native forward makes of the parts: (..., I/tp) of
    a column linear, this rank's summand of a row linear or of all experts. Nothing is sent here: the module around it
    (`shardcore.nn.experts.block.ExpertsBlock`) does that. The option ``cuts`` is a `Cut` for each parameter.
    """

    option_names: ClassVar[frozenset[str]] = frozenset({"cuts"})
    holds_parts: ClassVar[bool] = True

    _slices_cuts: Mapping[str, Cut]

    @classmethod
    @override
    def problem(cls, module: nn.Module, ranks: int, *, cuts: tuple[Cut, ...] = (), **options: Any) -> str | None:
        if problem := super().problem(module, ranks, **options):
            return problem
        kind = type(module).__name__
        own = {name: p for name, p in module._parameters.items() if p is not None}
        if others := sorted(own.keys() ^ {cut[0] for cut in cuts}):
            return f"{kind} and the rule disagree about {', '.join(others)}: every parameter has to be split"
        for name, dim, segments, unit, _ in cuts:
            size, left = divmod(own[name].size(dim), segments * unit)
            if left or last_rank_is_empty(size, ranks):
                what = f"{segments} segments of dim {dim}" if segments > 1 else f"dim {dim}"
                return (
                    f"{name} {tuple(own[name].shape)} of {kind} is split along {what}, which leaves the last of "
                    f"{ranks} ranks without a part"
                )
            if unit > 1 and size % ranks:
                return f"{name} of {kind} has {size} gates, each beside its feature, which {ranks} ranks do not divide"
            if segments > 1 and (lack := torch_lacks()):
                return lack
        return None

    @classmethod
    @override
    def layouts(
        cls, module: nn.Module, ranks: int, *, cuts: tuple[Cut, ...] = (), **options: Any
    ) -> Mapping[str, Layout]:
        return {name: SegmentedLayout(many, dim) if many > 1 else ShardedLayout(dim) for name, dim, many, *_ in cuts}

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, cuts: tuple[Cut, ...] = (), **options: Any
    ) -> Self:
        if context.size > 1 and any(cut.segments > 1 for cut in cuts):
            install()
        new = super().swap_class(module, context)
        # Products and lookups of rows make the gradients of matrices; that of a bias may be what others hold too.
        new.__dict__["_slices_cuts"] = {cut.parameter: cut for cut in cuts}
        new._fresh = all(p.ndim > 1 for p in new._parameters.values() if p is not None)
        return new

    @override
    def _read(self, own: Mapping[str, Any], *, fresh: bool) -> dict[str, Any]:
        shared = {name: p for name, p in own.items() if p is not None}
        for parameter in shared.values():
            expect_dtensor(parameter)
        parts = dict(zip(shared, read_local(*shared.values(), fresh=fresh), strict=True))
        # Whether experts run as torch's grouped products; who asks for that may do so later.
        grouped = getattr(getattr(self, "config", None), "_experts_implementation", None) == "grouped_mm"
        for name, part in parts.items():
            cut = self._slices_cuts[name]
            if cut.filled:
                size = shared[name].size(cut.dim)
                first, stop = chunk_bounds(size, self._shard_context.size, self._shard_context.rank)
                parts[name] = F.pad(part, (0, 0) * (part.ndim - 1 - cut.dim) + (first, size - stop))
            elif grouped:
                parts[name] = _padded(part, cut)
        return {**own, **parts}

    def extra_repr(self) -> str:
        """Describe the parts."""
        parts = ", ".join(f"{n} {tuple(p.shape)}" for n, p in self._parameters.items() if p is not None)
        return f"{parts}, tp={self._shard_context.size}"


def _padded(part: Tensor, cut: Cut) -> Tensor:
    """Return ``part`` with zeros after each segment of the dim that is cut, up to features of whole `_LINE`.

    What experts make of them is zero, and the rows that follow take nothing of it.
    """
    missing = -(part.size(cut.dim) // cut.segments // cut.unit) % (_LINE // part.element_size()) * cut.unit
    if not missing:
        return part
    segments = part.unflatten(cut.dim, (cut.segments, -1))
    return F.pad(segments, (0, 0) * (part.ndim - 1 - cut.dim) + (0, missing)).flatten(cut.dim, cut.dim + 1)
