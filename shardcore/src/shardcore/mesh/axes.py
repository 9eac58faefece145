"""The axes of the device mesh, and the names that they may have."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AXES", "DATA_AXES", "axis_name"]


#: The axes of the mesh, outermost first: tensor-parallel ranks are neighbours.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


#: The axes along which ranks hold replicas with data of their own.
DATA_AXES = ("dp_replicate", "dp_shard")


def axis_name(mesh: DeviceMesh, axis: str) -> str | None:
    """Return the name that ``axis``, one of `AXES`, has on ``mesh``; None if it does not have it.

    ``"dp"``, the commonest name for a data axis, is ``dp_shard``, as ``shard(dp=...)`` is.
    """
    names = mesh.mesh_dim_names or ()
    return next((name for name in (axis, "dp" if axis == "dp_shard" else axis) if name in names), None)
