"""Which values of a `shardcore.config.ShardConfig` are valid, and how sizes that are None are derived."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, get_args

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

import shardcore
from shardcore.config.pipelining import PIPELINE_FIELDS, SCHEDULE_NAMES, SPLIT_SCHEDULES
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh import AXES, ContextMode, PartialGradients, Sizes, axis_name

if TYPE_CHECKING:
    from shardcore.config import ShardConfig

__all__ = ["SIZES", "SWITCHES", "check", "fill_in", "sizes_of_place"]

# Values that a field can have at all, where that is a short list.
_CHOICES = {
    "partial_gradients": get_args(PartialGradients),
    "context_parallel_mode": get_args(ContextMode),
    "pipeline_schedule": (None, *SCHEDULE_NAMES),
}

#: Kinds of flash attention, by the names that libraries of models give them.
ATTENTIONS = ("flash_attention_4", "flash_attention_3", "flash_attention_2", "xformers")

SWITCHES = ("enable_flash_attention", "enable_fused_normalization", "enable_jit_fused")

_FLAGS = (
    "inference_only",
    "parallel_output",
    "enable_sequence_parallelism",
    "sequence_keep_gathered",
    "enable_all_optimization",
    "fp8_communication",
)

SIZES = (
    "tensor_parallel_size",
    "data_parallel_size",
    "dp_replicate_size",
    "dp_shard_size",
    "pipeline_parallel_size",
    "context_parallel_size",
)


def check(config: ShardConfig) -> None:
    """Refuse a configuration that is wrong, contradicts itself, or asks for things that do not work together.

    Raises:
        ConfigError: a value is of the wrong kind, or fields contradict each other.
        NotSupportedError: fields do not work together.
    """
    _check_kinds(config)
    _check_contradictions(config)
    _check_place(config)


def _check_kinds(config: ShardConfig) -> None:
    """Refuse values of the wrong kind."""

    def require(name: str, fits: bool, wanted: str) -> None:
        if not fits:
            raise ConfigError(f"ShardConfig.{name} must be {wanted}, got {getattr(config, name)!r}")

    for entry in dataclasses.fields(config):
        name, value = entry.name, getattr(config, entry.name)
        if name.endswith("_size") or name in ("num_microbatches", "num_model_chunks"):
            require(name, value is None or (type(value) is int and value >= 1), "a positive integer or None")
        if name in _FLAGS:
            require(name, isinstance(value, bool), "True or False")
        if name in SWITCHES:
            named = ATTENTIONS if name == "enable_flash_attention" else ()
            words = ", ".join(map(repr, ("auto", *named)))
            require(name, value in ("auto", *named) or isinstance(value, bool | None), f"True, False, {words} or None")
        if name in _CHOICES:
            require(name, value in _CHOICES[name], f"one of {', '.join(map(repr, _CHOICES[name]))}")
    require("device_mesh", isinstance(config.device_mesh, DeviceMesh | None), "a DeviceMesh or None")
    require(
        "gradient_checkpoint_config",
        isinstance(config.gradient_checkpoint_config, GradientCheckpointConfig | None),
        "a GradientCheckpointConfig or None",
    )
    every = config.check_inputs_every
    require("check_inputs_every", type(every) is int and every >= 0, "a number of calls, or 0 for never")
    bounds = config.pipeline_bounds
    require(
        "pipeline_bounds",
        bounds is None or (isinstance(bounds, tuple) and all(type(bound) is int for bound in bounds)),
        "a tuple of the numbers of blocks at which stages begin, with the number of blocks at its end, or None",
    )
    require("extra_kwargs", isinstance(config.extra_kwargs, Mapping), "a mapping of names to values")
    require(
        "tensor_parallel_process_group",
        isinstance(config.tensor_parallel_process_group, ProcessGroup | None),
        "a process group that this rank belongs to, or None",
    )


def _check_contradictions(config: ShardConfig) -> None:
    data, replicate, shard = config.data_parallel_size, config.dp_replicate_size, config.dp_shard_size
    if data and replicate and shard and data != replicate * shard:
        raise ConfigError(
            f"ShardConfig.data_parallel_size {data} is not dp_replicate_size {replicate} times dp_shard_size "
            f"{shard}; leave one of the three None"
        )
    if config.loss_chunk_size is not None and not config.parallel_output:
        raise ConfigError(
            f"ShardConfig.loss_chunk_size={config.loss_chunk_size} without parallel_output=True: gathered logits are "
            "not computed in chunks; give both or neither"
        )
    _check_pipeline(config)
    _check_context(config)
    if config.inference_only and config.gradient_checkpoint_config is not None:
        raise ConfigError(
            "ShardConfig.gradient_checkpoint_config contradicts inference_only=True: without a backward there is "
            "nothing to recompute; give one of them"
        )


def _check_context(config: ShardConfig) -> None:
    """Refuse what nothing divides along the sequence, and modes of what is not divided."""
    ranks = config.context_parallel_size or 1
    if ranks == 1:
        if config.context_parallel_mode != "auto":
            raise ConfigError(
                f"ShardConfig.context_parallel_mode={config.context_parallel_mode!r} without context parallelism says "
                "nothing; give context_parallel_size too, or leave it 'auto'"
            )
        return
    for name, asked in (
        ("pipeline_parallel_size", (config.pipeline_parallel_size or 1) > 1),
        ("expert_parallel_size", (config.expert_parallel_size or 1) > 1),
        ("enable_jit_fused", config.enable_jit_fused is True),
        ("enable_flash_attention", config.enable_flash_attention is True),
        ("device_mesh", config.device_mesh is not None),
        ("tensor_parallel_process_group", config.tensor_parallel_process_group is not None),
    ):
        if asked:
            raise NotSupportedError(
                f"ShardConfig.{name} together with context_parallel_size={ranks} is not supported by shardcore "
                f"{shardcore.__version__}; leave one of them out (sizes, such as tp= and dp=, say what a mesh would)"
            )


def _check_pipeline(config: ShardConfig) -> None:
    given = [name for name in PIPELINE_FIELDS if getattr(config, name) is not None]
    stages = config.pipeline_parallel_size or sizes_of_place(config).get("pipeline_parallel_size", 1)
    if stages == 1:
        if given:
            raise ConfigError(
                f"ShardConfig.{given[0]} without a pipeline says nothing; give pipeline_parallel_size too, or leave it "
                "None"
            )
        return
    if config.num_microbatches is not None and config.microbatch_size is not None:
        raise ConfigError(
            f"ShardConfig.num_microbatches={config.num_microbatches} and microbatch_size={config.microbatch_size} both "
            "divide a batch; give one of them"
        )
    for name, asked in (
        ("expert_parallel_size", (config.expert_parallel_size or 1) > 1),
        ("enable_jit_fused", config.enable_jit_fused is True),
        ("loss_chunk_size", config.loss_chunk_size is not None),
        (
            "sequence_keep_gathered",
            not config.sequence_keep_gathered and config.pipeline_schedule in SPLIT_SCHEDULES,
        ),
        ("tensor_parallel_process_group", config.tensor_parallel_process_group is not None),
    ):
        if asked:
            raise NotSupportedError(
                f"ShardConfig.{name} together with pipeline_parallel_size={stages} is not supported by shardcore "
                f"{shardcore.__version__}; leave one of them out"
            )


def _check_place(config: ShardConfig) -> None:
    """Check a mesh or a process group of the caller against the sizes."""
    mesh, group = config.device_mesh, config.tensor_parallel_process_group
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
    _check_experts(config)
    source = "device_mesh" if mesh is not None else "tensor_parallel_process_group"
    for name, size in sizes_of_place(config).items():
        given = getattr(config, name)
        if given is not None and given != size:
            raise ConfigError(f"ShardConfig.{name} is {given}, but {source} says {size}; leave the size None")


def _check_experts(config: ShardConfig) -> None:
    """Refuse to share experts among ranks that are not those of the default process group, in its order."""
    if (config.expert_parallel_size or 1) == 1:
        return
    mesh, group = config.device_mesh, config.tensor_parallel_process_group
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


def sizes_of_place(config: ShardConfig) -> dict[str, int]:
    """Return the sizes that the caller's mesh or process group determines."""
    if (mesh := config.device_mesh) is not None:
        sizes = Sizes.of(mesh)
        found = (sizes.tp, sizes.replicas, sizes.dp_replicate, sizes.dp_shard, sizes.pp, sizes.cp)
        return dict(zip(SIZES, found, strict=True))
    if (group := config.tensor_parallel_process_group) is not None:
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
        shard = experts
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
    if shard % experts:
        raise ConfigError(
            f"expert_parallel_size {experts} does not divide dp_shard_size {shard}: experts are shared among so many "
            f"replicas. Use dp={experts} or a multiple of it, or another expert_parallel_size"
        )
    return dict(zip(SIZES, (tensor, data, replicate, shard, pipeline, context), strict=True))
