"""The device mesh, what this rank is on it, and the random stream that a sharded model owns.

May import `shardcore.errors`.
"""

from __future__ import annotations

from shardcore.mesh.axes import AXES, DATA_AXES, Axis, Sizes, axis_name, replica_on
from shardcore.mesh.context import ContextMode, PartialGradients, ShardContext, as_context
from shardcore.mesh.marks import (
    Division,
    context_of,
    division_of,
    is_alone,
    nearest_context,
    set_alone,
    set_context,
    set_division,
    set_part_of,
    unwrapped,
)
from shardcore.mesh.meshes import (
    accelerator,
    build_mesh,
    current_device,
    device_type_here,
    device_type_of,
    forget_shared,
    group_of,
    group_of_ranks,
    host_group,
    mesh_of_group,
    shared_groups,
    time_limit,
)

__all__ = [
    "AXES",
    "DATA_AXES",
    "Axis",
    "ContextMode",
    "Division",
    "PartialGradients",
    "ShardContext",
    "Sizes",
    "accelerator",
    "as_context",
    "axis_name",
    "build_mesh",
    "context_of",
    "current_device",
    "device_type_here",
    "device_type_of",
    "division_of",
    "forget_shared",
    "group_of",
    "group_of_ranks",
    "host_group",
    "is_alone",
    "mesh_of_group",
    "nearest_context",
    "replica_on",
    "set_alone",
    "set_context",
    "set_division",
    "set_part_of",
    "shared_groups",
    "time_limit",
    "unwrapped",
]
