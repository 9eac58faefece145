"""What a rank is on the device mesh: the axes, this rank's groups, and the state that a sharded model shares."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, get_backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardcore._stream import RandomStream, mix
from shardcore.errors import ConfigError, NotSupportedError

__all__ = [
    "AXES",
    "DATA_AXES",
    "PartialGradients",
    "ShardContext",
    "accelerator",
    "as_context",
    "axis_name",
    "build_mesh",
    "context_of",
    "device_type_here",
    "device_type_of",
    "group_of",
    "mesh_of_group",
    "shared_groups",
    "unwrapped",
]

#: The axes of the mesh, outermost first: tensor-parallel ranks are neighbours.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")

#: The axes along which ranks hold replicas with data of their own.
DATA_AXES = ("dp_replicate", "dp_shard")

#: When the partial gradient of a replicated parameter is summed over the tensor-parallel ranks.
PartialGradients = Literal["in_backward", "deferred"]


def axis_name(mesh: DeviceMesh, axis: str) -> str | None:
    """Return the name that ``axis``, one of `AXES`, has on ``mesh``; None if it does not have it.

    ``"dp"``, the commonest name for a data axis, is ``dp_shard``, as ``shard(dp=...)`` is.
    """
    names = mesh.mesh_dim_names or ()
    return next((name for name in (axis, "dp" if axis == "dp_shard" else axis) if name in names), None)


_CONTEXT = "_shardcore_context"
_ALONE = "_shardcore_alone"
_PART_OF = "_shardcore_part_of"

# Where wrappers of torch keep the one module they wrap: torch.compile, checkpoint_wrapper, FSDP1.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardContext:
    """This rank's place on the mesh, passed to everything that runs inside one sharded model.

    Attributes:
        mesh: the mesh of the whole model; at least the axis ``tp``.
        tp: its one-dimensional ``tp`` axis, on which every parameter is a DTensor.
        group: the process group of ``tp``.
        rank: this rank's position on ``tp``.
        size: the number of ranks on ``tp``.
        random: the random stream of the model.
        partial_gradients: ``"in_backward"`` sums partial gradients of replicated parameters as they arise,
            ``"deferred"`` leaves them partial until `shardcore.reduce_partial_gradients`.
        keeps_gathered: under sequence parallelism, what regions gathered is kept for the backward, not gathered again.
        neighbours: this rank's group of so many neighbouring ranks of ``tp``, as far as `join_neighbours` made them.
    """

    mesh: DeviceMesh
    tp: DeviceMesh
    group: ProcessGroup
    rank: int
    size: int
    random: RandomStream
    partial_gradients: PartialGradients = "in_backward"
    keeps_gathered: bool = True
    neighbours: dict[int, ProcessGroup] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        *,
        seed: int = 0,
        partial_gradients: PartialGradients = "in_backward",
        keeps_gathered: bool = True,
        forks: bool = True,
    ) -> ShardContext:
        """Make the context of this rank on ``mesh``; ``seed`` must be the same on all ranks.

        With ``forks=False``, for modules alone, dropouts on split activations draw from the user's generators.
        """
        tp = mesh["tp"] if mesh.mesh_dim_names and "tp" in mesh.mesh_dim_names else mesh
        device = torch.device(mesh.device_type)
        context = cls(
            mesh=mesh,
            tp=tp,
            group=tp.get_group(),
            rank=tp.get_local_rank(),
            size=tp.size(),
            random=RandomStream(seed, tp.get_local_rank(), device, forks=forks),
            partial_gradients=partial_gradients,
            keeps_gathered=keeps_gathered,
            neighbours=_neighbours.setdefault(tp.get_group(), {}),
        )
        context.reseed(seed)
        return context

    def join_neighbours(self, count: int) -> None:
        """Make the groups of ``count`` neighbouring ranks that ``tp`` consists of; once for all models on its group.

        Every rank of ``tp`` makes the call, with the same counts in the same order.

        Args:
            count: divides the number of ranks; all of them are the group of ``tp`` itself.
        """
        if count in self.neighbours:
            return
        if count == self.size:
            self.neighbours[count] = self.group
            return
        first = self.rank // count * count
        ranks = [int(rank) for rank in self.tp.mesh.flatten()[first : first + count]]
        backend = get_backend(self.group)
        # Other ranks of the default group may be busy with something else.
        self.neighbours[count] = dist.new_group(ranks, backend=backend, use_local_synchronization=True)

    def reseed(self, seed: int) -> None:
        """Restart the random stream from a ``seed`` that all ranks share; each data-parallel replica draws others."""
        self.random.seed(mix(seed, self.replica))

    @property
    def replica(self) -> int:
        """Which data-parallel replica this rank belongs to, counted over all data axes.

        Where the mesh has none, because the caller arranges data parallelism, the first global rank of ``tp`` stands
        for the replica.
        """
        axes = [name for axis in DATA_AXES if (name := axis_name(self.mesh, axis))]
        if not axes:
            return int(self.tp.mesh.flatten()[0])
        index = 0
        for axis in axes:
            index = index * self.mesh[axis].size() + self.mesh[axis].get_local_rank()
        return index

    def axis_size(self, axis: str) -> int:
        """Return the number of ranks on an axis; 1 if the mesh does not have it."""
        name = axis_name(self.mesh, axis)
        return self.mesh[name].size() if name else 1

    @property
    def device(self) -> torch.device:
        """The device that parameters of this rank live on."""
        kind = self.tp.device_type
        return (
            torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardContext:
        # A copy of a sharded model runs on the same ranks, with a random stream of its own.
        return dataclasses.replace(self, random=copy.deepcopy(self.random, memo))


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

#: The groups of neighbours by the group of ``tp`` and their size; they end with it.
_neighbours: WeakKeyDictionary[ProcessGroup, dict[int, ProcessGroup]] = WeakKeyDictionary()


def build_mesh(sizes: dict[str, int]) -> DeviceMesh:
    """Return the mesh of the default process group with `AXES` of the given ``sizes`` (absent axes have size 1).

    Every rank of the default process group has to call this. Models that are sharded alike share one mesh: each new one
    would cost four process groups, with their threads and connections.
    """
    known = _shared.of(_default_group())
    key = device_type_of(), tuple(sizes.get(axis, 1) for axis in AXES)
    if key not in known:
        known[key] = init_device_mesh(*key, mesh_dim_names=AXES)
    return known[key]


def shared_groups() -> set[ProcessGroup]:
    """Return the process groups of the meshes that `build_mesh` keeps for the default process group.

    The groups of neighbours on them, and on the default process group, are among them.
    """
    groups = {group for mesh in _shared.of(_default_group()).values() for group in mesh.get_all_groups()}
    return groups.union(*(_neighbours.get(group, {}).values() for group in (*groups, _default_group())))


def _default_group() -> ProcessGroup:
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("there is no default process group; call torch.distributed.init_process_group() first")
    return world


def mesh_of_group(group: ProcessGroup) -> DeviceMesh:
    """Return the one-dimensional mesh, with the axis ``tp``, of the ranks of ``group``."""
    return DeviceMesh.from_group(group, device_type_of(group), mesh_dim_names=("tp",))


def group_of(mesh: DeviceMesh) -> ProcessGroup | None:
    """Return a process group of all ranks of ``mesh``; None for the default one.

    Every rank of the mesh makes the call: where there is no such group yet, it makes one.
    """
    if mesh.size() == dist.get_world_size():
        return None
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    backend = str(get_backend(mesh.get_group(0)))
    given = None if backend == "undefined" else backend  # groups that were started without one have the default
    group: ProcessGroup = dist.new_group(ranks, backend=given, use_local_synchronization=True)
    return group


def as_context(where: ProcessGroup | list[ProcessGroup] | DeviceMesh | ShardContext | None) -> ShardContext:
    """Return the context for whatever `ParallelModule.from_native_module` was given as its process group.

    None is the default process group.

    Raises:
        ConfigError: None was given, and there is no default process group.
        NotSupportedError: several process groups were given (multi-dimensional tensor parallelism).
    """
    if isinstance(where, ShardContext):
        return where
    if isinstance(where, DeviceMesh):
        return ShardContext.of(where, forks=False)
    if isinstance(where, list | tuple):
        if len(where) != 1:
            raise NotSupportedError(
                f"{len(where)} process groups were given; tensor parallelism here has one axis. Pass the one process "
                "group of the tensor-parallel ranks."
            )
        where = where[0]
    if where is None:
        if not dist.is_initialized():
            raise ConfigError(
                "no process group was given, and there is no default one; call shardcore.launch_from_torch() or "
                "torch.distributed.init_process_group() first, or give process_group="
            )
        where = _default_group()
    return ShardContext.of(mesh_of_group(where), forks=False)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of wrappers that only call it, such as that of ``torch.compile(model)``."""
    while (inner := next((part for name in _WRAPPED if (part := model._modules.get(name))), None)) is not None:
        model = inner
    return model


def context_of(model: nn.Module) -> ShardContext | None:
    """Return the context of a model that was sharded, or None."""
    return model.__dict__.get(_CONTEXT)


def is_alone(model: nn.Module) -> bool:
    """Tell whether ``model`` was sharded over a single rank, which changes nothing."""
    return bool(model.__dict__.get(_ALONE))


def set_alone(model: nn.Module) -> None:
    """Mark ``model`` as sharded over a single rank."""
    model.__dict__[_ALONE] = True


def set_context(model: nn.Module, context: ShardContext) -> None:
    """Mark ``model`` as sharded in ``context``."""
    model.__dict__[_CONTEXT] = context


def nearest_context(model: nn.Module) -> ShardContext | None:
    """Return the context of a model that was sharded, or of the one of which ``model`` is a named part, or None."""
    return context_of(model) or model.__dict__.get(_PART_OF)


def set_part_of(part: nn.Module, context: ShardContext) -> None:
    """Mark ``part`` as a model inside of one that was sharded in ``context``."""
    part.__dict__[_PART_OF] = context
