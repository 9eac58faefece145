"""A column-parallel linear that computes several projections at once, such as queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from torch import nn
from typing_extensions import override

from shardcore.comm.strided import install, segment_runs, torch_lacks
from shardcore.mesh.context import ShardContext
from shardcore.nn.layout import Layout, ReplicatedLayout, SegmentedLayout, last_rank_is_empty
from shardcore.nn.linear.members import ParallelLinear
from shardcore.nn.linear.parallel import ColumnLinear


class FusedColumnLinear(ColumnLinear):
    """A linear whose output features are n equal segments, [q|k|v], of which each is split.

    Weight (out/tp, in), or (in, out/tp) if transposed; bias (out), whole.

    Input (..., in), the same on all ranks; output (..., out/tp), which is [q_r|k_r|v_r] on rank r. It enters its region
    by itself or as a member, as `ColumnLinear` does.

    The weight is one DTensor of the native shape, so that checkpoints fit any number of ranks. The bias (out) is
    replicated: each rank uses its rows of it, and its gradient is summed, together with those of the region's other
    such parameters. See ``docs/adr/0001-fused-column-placement.md``. Under FSDP2, `shardcore.nn.fsdp_placement` is
    needed.

    Options:
        segments: the number of segments.
        enters: False if activations enter elsewhere (the linear is a member of a region).
    """

    option_names: ClassVar[frozenset[str]] = frozenset({"enters", "segments"})

    segments: int

    @classmethod
    @override
    def problem(cls, module: nn.Module, ranks: int, *, segments: Any = None, **options: Any) -> str | None:
        if problem := super().problem(module, ranks) or torch_lacks():
            return problem
        if not isinstance(segments, int) or segments < 2:
            return f"segments is {segments!r}; say how many equal segments out_features consists of, at least 2"
        size, rest = divmod(cls.computes(module).out_features, segments)
        if rest:
            return f"out_features {size * segments + rest} is not {segments} equal segments"
        if last_rank_is_empty(size, ranks):
            return (
                f"{type(module).__name__} has {segments} segments of {size} output features, which leaves the last of "
                f"{ranks} ranks without any; replicate the module, or use at most {size} ranks"
            )
        return None

    @classmethod
    @override
    def layouts(cls, module: nn.Module, ranks: int, *, segments: int = 0, **options: Any) -> Mapping[str, Layout]:
        dim = 1 if cls.computes(module).transposed else 0
        layouts: dict[str, Layout] = {"weight": SegmentedLayout(segments, dim)}
        if module._parameters.get("bias") is not None:
            layouts["bias"] = ReplicatedLayout(partial_gradient=True)
        return layouts

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, *, segments: int = 0, **options: Any) -> Self:
        install()
        new = super().swap_class(module, context, **options)
        new.segments = segments
        new.bias_rows = segment_runs(new.out_features, segments, context.size, context.rank)
        return new

    def extra_repr(self) -> str:
        """Describe the full linear, its segments and the number of ranks."""
        return f"{ParallelLinear.extra_repr(self)}, segments={self.segments}"
