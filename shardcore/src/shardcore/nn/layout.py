"""How one parameter is placed on the tensor-parallel ranks, and how it becomes a DTensor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from typing_extensions import override

from shardcore._torch import DTensorSpec
from shardcore.comm.collectives import chunk_bounds
from shardcore.comm.dtensor_params import spec_of, with_spec
from shardcore.comm.parts import Runs, cut, extent, runs_of, split_dim
from shardcore.comm.strided import segmented
from shardcore.mesh.context import ShardContext


def last_rank_is_empty(size: int, ranks: int) -> bool:
    """Tell whether cutting ``size`` into ``ranks`` parts leaves one without an element.

    Such a dim is not split: FSDP2 raises on the empty rank alone, and the others wait for it.
    """
    return -(-size // ranks) * (ranks - 1) >= size


def are_parts(rows: Sequence[Runs], size: int) -> bool:
    """Tell whether the rows that each rank uses, of ``size``, are those that `ShardedLayout` gives it."""
    return all(runs == (chunk_bounds(size, len(rows), rank),) for rank, runs in enumerate(rows))


@dataclass(frozen=True, slots=True)
class Layout(ABC):
    """The placement of a parameter on the mesh: on one axis, unless a subclass says otherwise."""

    #: The axis; the parameter is a DTensor on it.
    axis: ClassVar[str] = "tp"

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh that the parameter is a DTensor on."""
        return (self.axis,)

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The DTensor placement on each of `axes`."""
        return (self.placement,)

    @property
    @abstractmethod
    def placement(self) -> Placement:
        """The DTensor placement on the axis."""

    def shape(self, full: tuple[int, ...], ranks: int, rank: int = 0) -> tuple[int, ...]:
        """Return the shape of the part of ``rank`` among the ``ranks`` on ``tp``."""
        return extent(runs_of(full, (ranks,), self.placements, (rank,)))


@dataclass(frozen=True, slots=True)
class ReplicatedLayout(Layout):
    """Every rank has the full parameter.

    Attributes:
        partial_gradient: each rank uses the parameter for its part of the activations (its heads), so its gradient is
            partial, as DTensor's `Partial` is, and has to be summed.
    """

    partial_gradient: bool = False

    @property
    @override
    def placement(self) -> Placement:
        return Replicate()

    def __str__(self) -> str:
        return "replicated, gradient summed" if self.partial_gradient else "replicated"


@dataclass(frozen=True, slots=True)
class ShardedLayout(Layout):
    """Rank r has the r-th part along ``dim``, cut as `torch.chunk` cuts (the last parts may be smaller)."""

    dim: int

    @property
    @override
    def placement(self) -> Placement:
        return Shard(self.dim)

    def __str__(self) -> str:
        return f"split on dim {self.dim}"


@dataclass(frozen=True, slots=True)
class GroupShardedLayout(ShardedLayout):
    """Split into equal parts as `ShardedLayout` splits; ``group_size`` neighbouring ranks gather theirs for use.

    For a KV head that several ranks compute. A DTensor placement cannot say that only neighbours on an axis hold the
    same values, so each holds a part of the head.
    """

    group_size: int

    def __str__(self) -> str:
        return f"split on dim {self.dim}, gathered by groups of {self.group_size} ranks"


@dataclass(frozen=True, slots=True)
class ExchangedLayout(ShardedLayout):
    """Split as `ShardedLayout` splits; each rank uses other rows than it holds, which ranks send each other for use.

    For whole heads where parts are not, and for projections of different widths in one weight: no DTensor placement
    has them.
    """

    def __str__(self) -> str:
        return f"split on dim {self.dim}, exchanged among the ranks for use"


@dataclass(frozen=True, slots=True)
class SegmentedLayout(Layout):
    """``dim`` is ``count`` equal segments one after the other, each cut as `ShardedLayout` cuts: [q_r|k_r|v_r]."""

    count: int
    dim: int = 0

    @property
    @override
    def placement(self) -> Placement:
        return segmented(self.count, self.dim)

    def __str__(self) -> str:
        return f"{self.count} segments, each split on dim {self.dim}"


@dataclass(frozen=True, slots=True)
class ExpertsLayout(Layout):
    """Dim 0 counts experts, of which each rank of the axis ``ep`` has whole ones; each of these lies as ``inner`` says.

    Attributes:
        ranks: the number of ranks on ``ep``. Experts are cut as `torch.chunk` cuts: the last rank may have fewer.
        inner: the layout of one rank's experts on ``tp``; None where that has one rank.
    """

    axis: ClassVar[str] = "ep"

    ranks: int
    inner: Layout | None = None

    @property
    @override
    def axes(self) -> tuple[str, ...]:
        return (self.axis, *(self.inner.axes if self.inner else ()))

    @property
    @override
    def placements(self) -> tuple[Placement, ...]:
        return (self.placement, *(self.inner.placements if self.inner else ()))

    @property
    @override
    def placement(self) -> Placement:
        return Shard(0)

    @override
    def shape(self, full: tuple[int, ...], ranks: int, rank: int = 0) -> tuple[int, ...]:
        # No rank of ``ep`` has more than the first.
        return extent(runs_of(full, (self.ranks, ranks), self.placements, (0, rank)))

    def __str__(self) -> str:
        inner = f", each {self.inner}" if self.inner else ""
        return f"whole experts on {self.ranks} ranks{inner}"


#: The specs of DTensors by what decides them, for those that lie alike: to make one costs more than the tensor.
Specs: TypeAlias = dict[tuple[Layout, torch.Size, torch.dtype], DTensorSpec]


def distribute(
    parameter: nn.Parameter, layout: Layout, context: ShardContext, specs: Specs | None = None
) -> nn.Parameter:
    """Return ``parameter`` as a DTensor on the axes of its layout; the original is not changed.

    No collective runs: every rank cuts its part out of the full tensor that it has. Only that part moves to the device
    of the mesh. ``requires_grad``, an existing ``.grad`` and attributes set on the parameter are carried over.
    ``specs`` are those of parameters that were distributed in the same context; what is made is added.
    """
    specs = {} if specs is None else specs
    new = nn.Parameter(_as_dtensor(parameter, layout, context, specs), requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    if parameter.grad is not None:
        new.grad = _as_dtensor(parameter.grad, layout, context, specs)
    return new


def _as_dtensor(full: Tensor, layout: Layout, context: ShardContext, specs: Specs) -> Tensor:
    mesh = context.mesh_along(layout.axes)
    runs = runs_of(full.shape, mesh.shape, layout.placements, mesh.get_coordinate() or ())
    local = cut(full.detach(), runs)
    if any(split_dim(placement) is not None for placement in layout.placements) and all(len(own) == 1 for own in runs):
        local = local.clone(memory_format=torch.contiguous_format)  # the whole is let go of
    if local.device.type not in ("meta", mesh.device_type):
        local = local.to(context.device)
    if spec := specs.get((layout, full.shape, full.dtype)):
        return with_spec(local, spec)
    stride: Any = torch.empty(full.shape, device="meta").stride()  # the parts are contiguous, so the full tensor is
    made = DTensor.from_local(
        local.contiguous(), mesh, layout.placements, run_check=False, shape=full.shape, stride=stride
    )
    specs[layout, full.shape, full.dtype] = spec_of(made)
    return made
