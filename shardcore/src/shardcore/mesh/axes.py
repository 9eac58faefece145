"""The axes of device meshes, a rank's place on them, and the meshes: one for all models that are sharded alike."""

from __future__ import annotations

import datetime
import math
from dataclasses import astuple, dataclass, fields
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, get_backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcore._torch import set_timeout


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


def accelerator() -> str | None:
    """Return the kind of accelerator that this process can use (``"cuda"``, ``"xpu"``, ...), or None."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None else found.type


def device_type_of(group: ProcessGroup | None = None) -> str:
    """Return where tensors of a process group live: on the accelerator if the group has a backend of its own for it."""
    return _device_type(dist.get_backend_config(group), accelerator())


def _device_type(backends: str, accelerator: str | None) -> str:
    """Return the device type of a group with ``backends``, as torch prints them: ``"cpu:gloo,cuda:nccl"``.

    A group that was started without a backend has one for each kind of device, and those of the CPU (gloo, mpi) claim
    to serve accelerators too.
    """
    by_device = dict(pair.split(":", 1) for pair in backends.split(",") if ":" in pair)
    if accelerator is None or by_device.get(accelerator, "undefined") in ("fake", "gloo", "mpi", "undefined"):
        return "cpu"
    return accelerator


def current_device(kind: str) -> torch.device:
    """Return the device of a type that this process computes on."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def device_type_here() -> str:
    """Return where a model would run: where the default process group does, or else would if it were started."""
    return device_type_of() if dist.is_initialized() else accelerator() or "cpu"


class _SharedMeshes:
    """The meshes over all ranks of one default process group, by device type and shape; the next group starts anew."""

    def __init__(self) -> None:
        self._of: ReferenceType[ProcessGroup] | None = None
        self._known: dict[tuple[str, tuple[int, ...]], DeviceMesh] = {}

    def of(self, world: ProcessGroup) -> dict[tuple[str, tuple[int, ...]], DeviceMesh]:
        if self._of is None or self._of() is not world:
            self._of, self._known = ref(world), {}  # a mesh holds its groups, and they their threads
        return self._known


_shared = _SharedMeshes()


#: The groups of ranks that this process has made, by their ranks and what they are for: a backend, or ``"hosts"``. They
#: end with the group whose models share them: the default one, or for neighbours on ``tp`` that of ``tp``.
_groups: WeakKeyDictionary[ProcessGroup, dict[tuple[tuple[int, ...], str], ProcessGroup]] = WeakKeyDictionary()


def build_mesh(sizes: Sizes) -> DeviceMesh:
    """Return the mesh of the default process group with `AXES` of the given ``sizes``.

    Every rank of the default process group has to call this. Models that are sharded alike share one mesh: each new one
    would cost process groups, with their threads and connections. Axes of one rank share one group, on all meshes.
    """
    known = _shared.of(default_group())
    key = device_type_of(), sizes.shape
    if key not in known:
        known[key] = _new_mesh(*key)
        # Else a rank that is gone would be waited for as long as torch thinks right, whatever the user has said.
        for group in known[key].get_all_groups():
            _limit(group, time_limit())
    return known[key]


def _new_mesh(device_type: str, shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of all ranks; torch would make a group for each axis of one rank too."""
    wide = {axis: size for axis, size in zip(AXES, shape, strict=True) if size > 1} or {AXES[-1]: 1}
    mesh = init_device_mesh(device_type, tuple(wide.values()), mesh_dim_names=tuple(wide))
    alone = (dist.get_rank(),)  # what every rank of the default process group makes at a time
    groups = [mesh.get_group(axis) if axis in wide else group_of_ranks(alone, str(dist.get_backend())) for axis in AXES]
    return DeviceMesh.from_group(groups, device_type, mesh.mesh.view(shape), mesh_dim_names=AXES)


def time_limit(group: ProcessGroup | None = None) -> datetime.timedelta | None:
    """Return how long collectives of a process group, or of the default one, wait; None if its backend has no limit."""
    group = group or default_group()
    # The only way to a group's timeout, which may have been changed since it was made.
    backend: Any = group._get_backend(torch.device(device_type_of(group)))
    limit: datetime.timedelta | None = getattr(getattr(backend, "options", None), "_timeout", None)
    return limit


def _limit(group: ProcessGroup, limit: datetime.timedelta | None) -> None:
    if limit is not None and group is not default_group() and dist.get_backend(group) in ("gloo", "nccl"):
        set_timeout(limit, group)


def forget_shared() -> None:
    """Drop the meshes that `build_mesh` keeps: they hold groups with their threads, for a process that goes on."""
    _shared.of(default_group()).clear()


def shared_groups() -> set[ProcessGroup]:
    """Return the process groups of the meshes that `build_mesh` keeps for the default process group.

    The groups of neighbours on them, and on the default process group, are among them, and those of `group_of`.
    """
    groups = {group for mesh in _shared.of(default_group()).values() for group in mesh.get_all_groups()}
    return groups.union(*(_groups.get(group, {}).values() for group in (*groups, default_group())))


def default_group() -> ProcessGroup:
    """Return the default process group; raise if there is none."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no default process group; call torch.distributed.init_process_group() first")
    return world


def mesh_of_group(group: ProcessGroup) -> DeviceMesh:
    """Return the one-dimensional mesh, with the axis ``tp``, of the ranks of ``group``."""
    return DeviceMesh.from_group(group, device_type_of(group), mesh_dim_names=("tp",))


def group_of(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return a process group of all ranks of ``mesh``; None for the default one.

    Every rank of the mesh makes the call: where there is no such group yet, it makes one for all meshes of them.
    """
    if mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = tuple(sorted(int(rank) for rank in mesh.mesh.flatten()))
    return group_of_ranks(ranks, str(get_backend(mesh.get_group(0))))


def group_of_ranks(ranks: tuple[int, ...], backend: str, beside: ProcessGroup | None = None) -> ProcessGroup:
    """Return the one group of global ``ranks``, each of which makes the call.

    ``backend`` is as torch prints it. The group ends with ``beside``, or the default one, and waits as long.
    """
    if len(ranks) == dist.get_world_size():
        return default_group()
    known = _groups.setdefault(beside or default_group(), {})
    if (ranks, backend) not in known:
        given = None if backend == "undefined" else backend  # groups that were started without one have the default
        # Torch names groups that only their ranks make after these and the number of groups that a rank has made (2.13:
        # that it is in), so each further one is a chance to find another name on another rank, and to wait for it.
        group: ProcessGroup = dist.new_group(list(ranks), backend=given, use_local_synchronization=True)
        _limit(group, time_limit(beside))
        known[ranks, backend] = group
    return known[ranks, backend]


def host_group(ranks: tuple[int, ...], *, shared: bool = True) -> ProcessGroup:
    """Return a gloo group of global ``ranks``, whose collectives wait for no device; each of them makes the call.

    If ``shared``, one for all callers: the default group where it is such a group. Otherwise a new one, for a thread.
    """
    known = _groups.setdefault(default_group(), {})
    if shared and (ranks, "hosts") in known:
        return known[ranks, "hosts"]
    everybody = len(ranks) == dist.get_world_size()
    if shared and everybody and dist.get_backend() == "gloo":
        return default_group()
    # Of what ranks do on their hosts, such as writing files, the slowest may take long. One that is gone shows at once.
    limit = datetime.timedelta(hours=1)
    # Groups that only their ranks make are named after these: a second one would look for the first one's connections
    # if that has ended. So all ranks make it together where they can.
    group: ProcessGroup = dist.new_group(ranks, timeout=limit, backend="gloo", use_local_synchronization=not everybody)
    if shared:
        known[ranks, "hosts"] = group
    return group
