"""The axes of the device mesh: their names, their sizes, and a rank's place on one of them."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, fields

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardcore.comm.channel import Channel

__all__ = ["AXES", "DATA_AXES", "Axis", "Sizes", "axis_name", "replica_on"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The number of ranks on each axis of a mesh, outermost first: tensor-parallel ranks are neighbours."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Sizes:
        """Return the sizes of the axes that ``mesh`` has; a mesh without names is an axis ``tp``."""
        if not mesh.mesh_dim_names:
            return cls(tp=mesh.size())
        sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))  # a submesh for each would cost 0.5 ms
        return cls(**{axis: sizes[name] for axis in AXES if (name := axis_name(mesh, axis))})

    @property
    def replicas(self) -> int:
        """Model replicas with data of their own."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """All ranks."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes in the order of `AXES`."""
        return astuple(self)


#: The axes of the mesh, outermost first.
AXES = tuple(field.name for field in fields(Sizes))

#: The axes along which ranks hold replicas with data of their own.
DATA_AXES = ("dp_replicate", "dp_shard")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Axis:
    """This rank's place on one axis.

    Attributes:
        name: one of `AXES`.
        mesh: the one-dimensional mesh along it.
        channel: between its ranks.
    """

    name: str
    mesh: DeviceMesh
    channel: Channel

    @classmethod
    def of(cls, name: str, mesh: DeviceMesh) -> Axis:
        """Return this rank's place on a one-dimensional mesh."""
        return cls(name=name, mesh=mesh, channel=Channel(mesh.get_group()))

    @property
    def group(self) -> ProcessGroup:
        """The process group."""
        return self.channel.group

    @property
    def rank(self) -> int:
        """This rank's position."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.channel.size


def axis_name(mesh: DeviceMesh, axis: str) -> str | None:
    """Return the name that ``axis``, one of `AXES`, has on ``mesh``; None if it does not have it.

    ``"dp"``, the commonest name for a data axis, is ``dp_shard``, as ``shard(dp=...)`` is.
    """
    names = mesh.mesh_dim_names or ()
    return next((name for name in (axis, "dp" if axis == "dp_shard" else axis) if name in names), None)


def replica_on(mesh: DeviceMesh) -> int:
    """Return which model replica this rank belongs to, counted over all data axes of ``mesh``."""
    index = 0
    for axis in DATA_AXES:
        if (name := axis_name(mesh, axis)) is not None:
            dim = (mesh.mesh_dim_names or ()).index(name)
            index = index * mesh.size(dim) + mesh.get_local_rank(dim)
    return index
