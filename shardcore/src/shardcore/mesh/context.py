"""What a rank is on the device mesh, what modules of a model share of it, and what the model remembers of itself."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup, get_backend
from torch.distributed.device_mesh import DeviceMesh

from shardcore.comm.collectives import Channel
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import (
    DATA_AXES,
    Sizes,
    axis_name,
    current_device,
    default_group,
    group_of,
    group_of_ranks,
    mesh_of_group,
    replica_on,
)
from shardcore.mesh.random_stream import RandomStream, mix
from shardcore.transfer.fp8 import Fp8Channel
from shardcore.transfer.products import Overlap

#: When the partial gradient of a replicated parameter is summed over the tensor-parallel ranks.
PartialGradients = Literal["in_backward", "deferred"]

#: How tokens that are divided over ``cp`` attend to each other.
ContextMode = Literal["auto", "all_to_all", "ring_attn"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ShardContext:
    """This rank's place on the mesh, passed to everything that runs inside one sharded model.

    Attributes:
        mesh: the mesh of the whole model; at least the axis ``tp``.
        parameters: the mesh on which parameters lie: ``mesh``, or where it has several ranks on ``cp`` one of the same
            ranks that counts these as ``dp_shard``.
        tp: the one-dimensional ``tp`` axis of ``parameters``, on which every parameter is a DTensor.
        channel: between the ranks of ``tp``; it has their process group, their number and this rank's position.
        random: the random stream of the model.
        partial_gradients: ``"in_backward"`` sums partial gradients of replicated parameters as they arise,
            ``"deferred"`` leaves them partial until `shardcore.reduce_partial_gradients`.
        keeps_gathered: under sequence parallelism, what regions gathered is kept for the backward, not gathered again.
        overlap: under sequence parallelism, whether regions multiply some tokens while others travel.
        fuses_regions: whether the entry of a region computes the parameter gradients of its members beside its own
            collective. False where each node has to compute its own gradient (schedules that split a backward).
        experts: the mesh of the ranks by the experts that they hold: its axes ``dp_shard`` and ``ep`` together are the
            ``dp_shard`` of ``mesh``. None where every rank has all experts, or slices of all.
        neighbours: between this rank and so many neighbours on ``tp``, as far as `join_neighbours` made it.
        origin: the distribution that brought the model's policy, and its version; empty for a policy that was given.
    """

    mesh: DeviceMesh
    parameters: DeviceMesh
    tp: DeviceMesh
    channel: Channel
    random: RandomStream
    partial_gradients: PartialGradients = "in_backward"
    keeps_gathered: bool = True
    overlap: Overlap = False
    fuses_regions: bool = True
    experts: DeviceMesh | None = None
    neighbours: dict[int, Channel] = field(default_factory=dict)
    origin: str = ""

    @classmethod
    def of(
        cls,
        mesh: DeviceMesh,
        *,
        seed: int = 0,
        forks: bool = True,
        fp8: bool = False,
        parameters: DeviceMesh | None = None,
        **attributes: Any,
    ) -> ShardContext:
        """Make the context of this rank on ``mesh``; ``seed`` must be the same on all ranks.

        With ``forks=False``, for modules alone, dropouts on split activations draw from the user's generators.
        With ``fp8`` activations travel along ``tp`` in 8 bits; ``parameters`` and further ones as the ``attributes``.
        """
        parameters = mesh if parameters is None else parameters
        tp = parameters["tp"] if parameters.mesh_dim_names and "tp" in parameters.mesh_dim_names else parameters
        device = torch.device(mesh.device_type)
        channel = (Fp8Channel if fp8 else Channel)(tp.get_group())
        context = cls(
            mesh=mesh,
            parameters=parameters,
            tp=tp,
            channel=channel,
            random=RandomStream(seed, channel.rank, device, forks=forks),
            **attributes,
        )
        context.reseed(seed)
        return context

    @property
    def group(self) -> ProcessGroup:
        """The process group of ``tp``."""
        return self.channel.group

    @property
    def rank(self) -> int:
        """This rank's position on ``tp``."""
        return self.channel.rank

    @property
    def size(self) -> int:
        """The number of ranks on ``tp``."""
        return self.channel.size

    @property
    def defers(self) -> bool:
        """Whether partial gradients stay partial until `shardcore.reduce_partial_gradients`."""
        return self.partial_gradients == "deferred"

    @property
    def fuses(self) -> bool:
        """Whether regions take their fused path now; a compiled graph cannot hold what it keeps in Python."""
        return self.fuses_regions and not torch.compiler.is_compiling()

    def join_neighbours(self, count: int) -> None:
        """Find the groups of ``count`` neighbouring ranks that ``tp`` consists of, one for all models on its group.

        Every rank of ``tp`` makes the call, with the same counts, which divide the number of ranks, in the same order.
        """
        if count in self.neighbours or count == self.size:
            return
        first = self.rank // count * count
        ranks = [int(rank) for rank in self.tp.mesh.flatten()[first : first + count]]
        self.neighbours[count] = Channel(group_of_ranks(tuple(ranks), str(get_backend(self.group)), self.group))

    def among(self, count: int) -> Channel:
        """Return the channel between the ``count`` neighbouring ranks that this one belongs to; see `join_neighbours`.

        What travels on it are parameters, so it is exact.
        """
        return self.channel.exact if count == self.size else self.neighbours[count]

    def reseed(self, seed: int) -> None:
        """Restart the random stream from a ``seed`` that all ranks share; each data-parallel replica draws others."""
        self.random.seed(self.seed_of(seed))

    def seed_of(self, seed: int) -> int:
        """Return the seed of this replica that follows from one that all ranks share."""
        return mix(seed, self.replica)

    @property
    def replica(self) -> int:
        """Which data-parallel replica this rank belongs to, counted over all data axes.

        Where the mesh has none, because the caller arranges data parallelism, the first global rank of ``tp`` stands
        for the replica.
        """
        known = any(axis_name(self.mesh, axis) for axis in DATA_AXES)
        return replica_on(self.mesh) if known else int(self.tp.mesh.flatten()[0])

    @property
    def sharers(self) -> tuple[int, ...]:
        """The global ranks that are given the same batch, in order: those of ``tp`` and, if there are, of ``cp``."""
        mesh = self.tp if self.mesh is self.parameters else self.mesh[("cp", "tp")]
        return tuple(int(rank) for rank in mesh.mesh.flatten())

    @property
    def sharing_group(self) -> ProcessGroup:
        """Their process group; each of them asks for it."""
        if self.mesh is self.parameters:
            return self.group
        return group_of(self.mesh[("cp", "tp")]) or default_group()

    @property
    def replica_groups(self) -> list[ProcessGroup]:
        """The process group of each data axis with several ranks: together they reach all replicas."""
        axes = [name for axis in DATA_AXES if (name := axis_name(self.parameters, axis))]
        groups = [self.parameters.get_group(axis) for axis in axes]
        return [group for group in groups if group.size() > 1]

    @property
    def sizes(self) -> Sizes:
        """The number of ranks on each axis."""
        return Sizes.of(self.mesh)

    def axis(self, name: str) -> Channel:
        """Return the channel between the ranks on the axis ``name``, one of `AXES`.

        Raises:
            ConfigError: the mesh has no such axis.
        """
        return self.channel if name == "tp" else Channel(self.mesh_along((name,)).get_group())

    def mesh_along(self, axes: tuple[str, ...]) -> DeviceMesh:
        """Return the mesh whose axes are ``axes``, in this order.

        Raises:
            ConfigError: there is none.
        """
        if axes == ("tp",):
            return self.tp
        if self.experts is not None and "ep" in axes:
            return self.experts[axes]
        if len(axes) > 1:
            raise ConfigError(f"no parameter lies on the axes {', '.join(axes)}: the model has no axis 'ep'")
        if (own := axis_name(self.mesh, axes[0])) is None:
            names = ", ".join(self.mesh.mesh_dim_names or ("tp",))
            raise ConfigError(f"the mesh has no axis {axes[0]!r}; its axes are {names}")
        return self.mesh[own]

    @property
    def device(self) -> torch.device:
        """The device that parameters of this rank live on."""
        return current_device(self.tp.device_type)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardContext:
        # A copy of a sharded model runs on the same ranks, with a random stream of its own.
        return dataclasses.replace(self, random=copy.deepcopy(self.random, memo))


def as_context(where: ProcessGroup | list[ProcessGroup] | DeviceMesh | ShardContext | None) -> ShardContext:
    """Return the context for whatever `ParallelModule.from_native_module` was given as its process group.

    None is the default process group; several groups (multi-dimensional tensor parallelism) are refused.
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
        where = default_group()
    return ShardContext.of(mesh_of_group(where), forks=False)


_CONTEXT = "_shardcore_context"
_ALONE = "_shardcore_alone"
_PART_OF = "_shardcore_part_of"
_DIVISION = "_shardcore_division"

# Where wrappers of torch keep the one module they wrap: torch.compile, checkpoint_wrapper, FSDP1.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How a model was divided among the ranks of a pipeline, on one of them.

    Attributes:
        position: of this rank in the pipeline.
        names: all names in the state dict of the whole model.
        first_names: the first name of each parameter that has several in the whole model, by its other names: on
            several ranks it may be there once under each.
    """

    position: int
    names: frozenset[str]
    first_names: Mapping[str, str]


def division_of(model: nn.Module) -> Division | None:
    """Return how ``model`` was divided, or None."""
    return model.__dict__.get(_DIVISION)


def set_division(model: nn.Module, division: Division) -> None:
    """Mark ``model`` as this rank's part of a whole one."""
    model.__dict__[_DIVISION] = division
