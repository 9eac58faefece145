"""The process groups of a mesh by the names of its axes."""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from shardcore.errors import ConfigError
from shardcore.mesh.axes import DATA_AXES, axis_name


class ProcessGroupManager:
    """The process groups along the axes of a mesh: ``tp``, ``dp_shard``, ``dp_replicate``, and ``dp`` for both of them.

    After ColossalAI's ``ProcessGroupManager``; the groups are torch's own.

    Args:
        mesh: the mesh; None for one rank alone, where every axis has size 1 and there is no group.
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh

    @property
    def axes(self) -> tuple[str, ...]:
        """The names of the axes."""
        return () if self.mesh is None else tuple(self.mesh.mesh_dim_names or ())

    def get(self, axis: str) -> ProcessGroup:
        """Return this rank's process group along ``axis``.

        Raises:
            ConfigError: there is no such axis, or one rank is all there is. (``dp`` has a group of its own only where
                one of its two axes has size 1.)
        """
        if self.mesh is None:
            raise ConfigError(f"there is no process group {axis!r}: this process runs alone; start it with torchrun")
        if axis == "dp":
            wide = [name for name in DATA_AXES if self.size(name) > 1]
            if len(wide) > 1:
                raise ConfigError("dp has two axes here; get('dp_replicate') and get('dp_shard') are its groups")
            axis = wide[0] if wide else next((name for name in DATA_AXES[::-1] if self._name(name)), "dp")
        if (name := self._name(axis)) is None:
            raise ConfigError(f"the mesh has no axis {axis!r}; its axes are {', '.join(self.axes)}")
        return self.mesh.get_group(name)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``; 1 for one that the mesh does not have."""
        if axis == "dp":
            return self.size("dp_replicate") * self.size("dp_shard")
        name = self._name(axis)
        return self.mesh[name].size() if self.mesh is not None and name else 1

    def rank(self, axis: str) -> int:
        """Return this rank's position along ``axis``; 0 for one that the mesh does not have."""
        if axis == "dp":
            return self.rank("dp_replicate") * self.size("dp_shard") + self.rank("dp_shard")
        name = self._name(axis)
        return self.mesh[name].get_local_rank() if self.mesh is not None and name else 0

    def _name(self, axis: str) -> str | None:
        return None if self.mesh is None else axis_name(self.mesh, axis)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={self.size(axis)}" for axis in self.axes)
        return f"{type(self).__name__}({sizes or 'one rank'})"
