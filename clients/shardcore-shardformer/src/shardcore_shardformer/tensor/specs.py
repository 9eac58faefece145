"""Among whom a `ColoTensor` is divided, how, and what layers make of it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import device_type_of


class ProcessGroup:
    """All ranks as ``dp_degree`` groups, beside each other, of ``tp_degree`` neighbours that divide tensors.

    Of eight ranks with ``tp_degree=4`` the first four are a tensor-parallel group, and ranks 1 and 5 a data-parallel
    one. After ColossalAI's ``ProcessGroup``; ``mesh`` is torch's word for it, with the axes ``dp`` and ``tp``.

    Args:
        tp_degree: how many ranks divide a tensor; by default what ``dp_degree`` leaves.
        dp_degree: how many groups of them there are; by default what ``tp_degree`` leaves, or all ranks without it.

    Raises:
        ConfigError: there is no default process group, or ``tp_degree * dp_degree`` is not its size.
    """

    def __init__(self, *, tp_degree: int | None = None, dp_degree: int | None = None) -> None:
        if not dist.is_initialized():
            raise ConfigError("ProcessGroup needs the ranks of a job; call launch(...) first, or launch_from_torch()")
        world = dist.get_world_size()
        if any(degree is not None and (type(degree) is not int or degree < 1) for degree in (tp_degree, dp_degree)):
            raise ConfigError(f"ProcessGroup({tp_degree=}, {dp_degree=}); wanted positive integers")
        tp = tp_degree or (1 if dp_degree is None else world // dp_degree)
        dp = dp_degree or world // tp
        if tp * dp != world:
            raise ConfigError(f"ProcessGroup({tp_degree=}, {dp_degree=}) of {world} ranks; wanted tp * dp = {world}")
        self.mesh: DeviceMesh = init_device_mesh(device_type_of(), (dp, tp), mesh_dim_names=("dp", "tp"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcessGroup) and self.mesh == other.mesh

    def __hash__(self) -> int:
        return hash(self.mesh)

    def __repr__(self) -> str:
        return f"ProcessGroup(tp_degree={self.tp_world_size()}, dp_degree={self.dp_world_size()})"

    def tp_world_size(self) -> int:
        """Return how many ranks divide a tensor."""
        return self.mesh["tp"].size()

    def dp_world_size(self) -> int:
        """Return how many ranks have what this one has."""
        return self.mesh["dp"].size()

    def tp_local_rank(self) -> int:
        """Return which part is this rank's."""
        return self.mesh["tp"].get_local_rank()

    def dp_local_rank(self) -> int:
        """Return this rank's number among those that have the same part."""
        return self.mesh["dp"].get_local_rank()

    def tp_process_group(self) -> dist.ProcessGroup:
        """Return torch's group of the ranks that divide a tensor."""
        return self.mesh["tp"].get_group()

    def dp_process_group(self) -> dist.ProcessGroup:
        """Return torch's group of the ranks with this rank's part, which average its gradient."""
        return self.mesh["dp"].get_group()


@dataclass(frozen=True)
class ReplicaSpec:
    """Every rank has the whole tensor."""


@dataclass(frozen=True)
class ShardSpec:
    """A tensor is divided evenly along one dimension.

    Args:
        dims: the dimension, alone in a list; -1 is the last.
        num_partitions: the number of parts, alone in a list: `ProcessGroup.tp_world_size`.

    Raises:
        ConfigError: one of them is no list of integers, or there are no parts.
        NotSupportedError: several dimensions are to be divided.
    """

    dims: Sequence[int]
    num_partitions: Sequence[int]

    def __post_init__(self) -> None:
        for name in ("dims", "num_partitions"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or any(type(number) is not int for number in value):
                raise ConfigError(f"ShardSpec({name}={value!r}); wanted one integer in a list, as dims=[-1]")
            object.__setattr__(self, name, tuple(value))
        if len(self.dims) != 1 or len(self.num_partitions) != 1:
            raise NotSupportedError(
                f"{self} does not divide along one dimension; name one, and its number of parts: ShardSpec([-1], [2])"
            )
        if self.num_partitions[0] < 1:
            raise ConfigError(f"{self}: wanted at least one part")


class ComputePattern(enum.Enum):
    """By which scheme layers compute with a divided tensor; `TP1D`, Megatron's, is the one that is served."""

    TP1D = 0
    TP2D = 1
    TP2P5D = 2
    TP3D = 3


@dataclass
class ComputeSpec:
    """What a linear layer or an embedding makes of a parameter that is divided.

    Args:
        compute_pattern: `ComputePattern.TP1D`.

    Attributes:
        output_replicate: whether every rank gets the layer's whole output; else it stays as the weight divides it.

    Raises:
        NotSupportedError: another pattern.
    """

    compute_pattern: ComputePattern
    output_replicate: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if self.compute_pattern is not ComputePattern.TP1D:
            raise NotSupportedError(
                f"ComputeSpec({self.compute_pattern}) is not served; use ComputePattern.TP1D, which divides a weight "
                "along one dimension"
            )

    def set_output_replicate(self, flag: bool = True) -> None:
        """Say whether every rank gets the whole output."""
        self.output_replicate = flag


@dataclass
class ColoTensorSpec:
    """All that a `ColoTensor` knows beside its values.

    Args:
        pg: among whom the tensor is divided.
        dist_attr: how.
        compute_attr: what layers make of it; None for a tensor that is no parameter.

    Raises:
        ConfigError: an argument is of another type, or ``pg`` has another number of ranks than there are parts.
    """

    pg: ProcessGroup
    dist_attr: ShardSpec | ReplicaSpec = field(default_factory=ReplicaSpec)
    compute_attr: ComputeSpec | None = None

    def __post_init__(self) -> None:
        wanted = {"pg": ProcessGroup, "dist_attr": ShardSpec | ReplicaSpec, "compute_attr": ComputeSpec | None}
        for name, kind in wanted.items():
            if not isinstance(value := getattr(self, name), kind):
                raise ConfigError(f"ColoTensorSpec({name}={value!r}); wanted {getattr(kind, '__name__', kind)}")
        if isinstance(self.dist_attr, ShardSpec) and self.dist_attr.num_partitions[0] != self.pg.tp_world_size():
            raise ConfigError(
                f"{self.dist_attr} among {self.pg}; wanted num_partitions=[{self.pg.tp_world_size()}], which is "
                "[pg.tp_world_size()]"
            )


def placement_of(dist_spec: ShardSpec | ReplicaSpec, whole: torch.Size) -> Replicate | Shard:
    """Return DTensor's word for how a tensor of shape ``whole`` is divided.

    Raises:
        ConfigError: there is no such dimension, or it has no even parts.
    """
    if isinstance(dist_spec, ReplicaSpec):
        return Replicate()
    (dim,), (parts,) = dist_spec.dims, dist_spec.num_partitions
    if not -len(whole) <= dim < len(whole):
        raise ConfigError(f"{dist_spec} of a tensor of shape {tuple(whole)}; it has no dimension {dim}")
    if whole[dim] % parts:
        raise ConfigError(
            f"{dist_spec} of a tensor of shape {tuple(whole)}: {whole[dim]} is no multiple of {parts}; divide another "
            "dimension, or leave it whole (ReplicaSpec())"
        )
    return Shard(dim % len(whole))
