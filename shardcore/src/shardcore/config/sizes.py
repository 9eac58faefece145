"""The numbers of ranks of a `shardcore.config.ShardConfig`: what a mesh says of them, and those that are None."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import shardcore
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh.axes import AXES, Sizes, axis_name

SIZES = (
    "tensor_parallel_size",
    "data_parallel_size",
    "dp_replicate_size",
    "dp_shard_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)


def check_place(mesh: DeviceMesh | None, group: ProcessGroup | None, given: Mapping[str, int | None]) -> None:
    """Refuse a mesh or a process group of the caller that is none, or says other sizes than those that are given."""
    if mesh is not None and group is not None:
        raise ConfigError(
            "ShardConfig.device_mesh and tensor_parallel_process_group both say which ranks are tensor-parallel; give "
            "the mesh, whose axis 'tp' has a process group of its own"
        )
    if mesh is not None:
        names = mesh.mesh_dim_names or ()
        if "tp" not in names or names != tuple(name for axis in AXES if (name := axis_name(mesh, axis))):
            raise ConfigError(
                f"ShardConfig.device_mesh has the axes {names or '(unnamed)'}; wanted 'tp' and, before it, whichever "
                f"there are of {AXES[:-1]}, in this order ('dp' is another name for 'dp_shard'): "
                "init_device_mesh('cuda', (2, 4), mesh_dim_names=('dp', 'tp')). A mesh that a library brings with "
                "other names (Fabric's ModelParallelStrategy) is not needed: leave it out, and say tp= and dp= instead"
            )
        if mesh.get_coordinate() is None:
            raise ConfigError("ShardConfig.device_mesh does not hold this rank; only the ranks of a mesh shard over it")
        if "ep" in names and mesh["ep"].size() > 1:
            raise ConfigError(
                f"ShardConfig.device_mesh has {mesh['ep'].size()} ranks on an axis 'ep'; give a mesh without it, whose "
                "'dp_shard' has all replicas that shard parameters, and expert_parallel_size"
            )
        if "cp" in names and mesh["cp"].size() > 1:
            raise NotSupportedError(
                f"ShardConfig.device_mesh has {mesh['cp'].size()} ranks on its axis 'cp', which is not supported by "
                f"shardcore {shardcore.__version__}; leave the mesh out, and say context_parallel_size and the others"
            )
    source = "device_mesh" if mesh is not None else "tensor_parallel_process_group"
    for name, size in sizes_of_place(mesh, group).items():
        if given[name] is not None and given[name] != size:
            raise ConfigError(f"ShardConfig.{name} is {given[name]}, but {source} says {size}; leave the size None")


def check_experts(mesh: DeviceMesh | None, group: ProcessGroup | None) -> None:
    """Refuse to share experts among ranks that are not those of the default process group, in its order."""
    if group is not None:
        raise ConfigError(
            "ShardConfig.expert_parallel_size needs to know the replicas, and tensor_parallel_process_group says "
            "nothing about them; leave the group None, or give device_mesh"
        )
    if mesh is not None and mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise ConfigError(
            f"ShardConfig.expert_parallel_size with a device_mesh of the ranks {mesh.mesh.flatten().tolist()}; wanted "
            f"all {dist.get_world_size()} ranks in their order"
        )


def sizes_of_place(mesh: DeviceMesh | None, group: ProcessGroup | None) -> dict[str, int]:
    """Return the sizes that the caller's mesh or process group determines."""
    if mesh is not None:
        sizes = Sizes.of(mesh)
        found = (sizes.tp, sizes.replicas, sizes.dp_replicate, sizes.dp_shard, sizes.pp, sizes.cp)
        return dict(zip(SIZES, found, strict=True))
    if group is not None:
        return dict(zip(SIZES, (group.size(), 1, 1, 1, 1, 1), strict=True))
    return {}


def fill_in(given: Mapping[str, int | None], world_size: int, *, experts: int = 1) -> dict[str, int]:
    """Derive the sizes that are None from the others and the number of ranks.

    Where nothing says how many replicas there are, there are as many as share ``experts``.
    """
    tensor, data, replicate, shard, pipeline, context = (given[name] for name in SIZES)
    pipeline, context = pipeline or 1, context or 1
    each = world_size
    for name, size in (("pipeline_parallel_size", pipeline), ("context_parallel_size", context)):
        if each % size:
            raise ConfigError(
                f"{name} {size} does not divide the number of ranks, {each}; start a multiple of {size} ranks, or "
                "change the size"
            )
        each //= size  # ranks of a stage, that have the same tokens
    if experts > 1 and tensor is data is replicate is shard is None:
        shard = max(1, experts // context)
    if data is None and shard:
        data = shard * (replicate or 1)
    if tensor is None:
        tensor = max(1, each // (data or replicate or 1))
    if data is None:
        data = max(1, each // tensor)
    if (wanted := tensor * data * pipeline * context) != world_size:
        others = (("pipeline_parallel_size", pipeline), ("context_parallel_size", context))
        stages = "".join(f"{name} {size} times " for name, size in others if size > 1)
        raise ConfigError(
            f"{stages}tensor_parallel_size {tensor} times data_parallel_size {data} is {wanted}, but there "
            f"{'is 1 rank' if world_size == 1 else f'are {world_size} ranks'}; "
            f"start {wanted} ranks (torchrun --nproc-per-node {wanted} ...) or change the sizes"
        )
    replicate = replicate or (data // shard if shard else 1)
    shard = shard or data // replicate
    if replicate * shard != data:
        raise ConfigError(
            f"dp_replicate_size {replicate} times dp_shard_size {shard} is {replicate * shard}, but "
            f"data_parallel_size is {data}"
        )
    if shard * context % experts:
        beside = f" times context_parallel_size {context}" if context > 1 else ""
        raise ConfigError(
            f"expert_parallel_size {experts} does not divide dp_shard_size {shard}{beside}: experts are shared among "
            f"so many ranks. Use dp={experts} or a multiple of it, or another expert_parallel_size"
        )
    return dict(zip(SIZES, (tensor, data, replicate, shard, pipeline, context), strict=True))
