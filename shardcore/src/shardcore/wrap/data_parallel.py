"""The data axes: FSDP2 block by block, over a model that was sharded along ``tp`` (or not at all)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from shardcore.comm.strided import fsdp_placement
from shardcore.errors import Problem
from shardcore.mesh import ShardContext, axis_name
from shardcore.nn import SegmentedLayout
from shardcore.nn.units import prepare_units, require_known_fsdp
from shardcore.plan import ShardPlan
from shardcore.policy import Stages

__all__ = ["apply_data_parallel", "unwrappable"]


def apply_data_parallel(model: nn.Module, context: ShardContext, stages: Stages | None, **options: Any) -> nn.Module:
    """Apply FSDP2 to every block and to the rest of ``model``, in place; does nothing without a data axis.

    ``dp_shard`` shards parameters, gradients and optimizer state (`torch.distributed.fsdp.fully_shard`);
    ``dp_replicate`` keeps whole copies whose gradients are averaged; both together are hybrid sharding. Any part of the
    model may be called by itself afterwards (`shardcore.nn.units`).

    Args:
        model: the model, sharded along ``tp`` before.
        context: its context.
        stages: names the list of blocks; without it the model is wrapped as one.
        **options: of ``fully_shard`` (``mp_policy``, ``offload_policy``, ``reshard_after_forward``,
            ``shard_placement_fn``, which is not asked about fused weights).
    """
    sizes = context.sizes
    replicas, shards = sizes.dp_replicate, sizes.dp_shard
    if replicas * shards == 1:
        return model
    wide = {"dp_replicate": replicas, "dp_shard": shards}
    mesh = context.mesh[tuple(axis_name(context.mesh, axis) or axis for axis, size in wide.items() if size > 1)]
    wrap: Callable[..., Any] = _replicate if shards == 1 else fully_shard
    if shards > 1 and any(fsdp_placement(p) for p in model.parameters()):
        options["shard_placement_fn"] = _placement(options.get("shard_placement_fn"))
    lists = stages.lists if stages else ()
    blocks = [block for name in lists for block in model.get_submodule(name).children()]
    reshards = options.get("reshard_after_forward") is not False
    for unit in prepare_units(model, blocks, reshards=reshards):
        wrap(unit.module, mesh=mesh, **options)
        unit.watch()
    return model


def unwrappable(model: nn.Module, plan: ShardPlan) -> list[Problem]:
    """Return what FSDP2 would refuse of ``model`` once it is sharded by ``plan``, after it was changed.

    Raises:
        NotSupportedError: the installed torch has an FSDP2 that shardcore does not know.
    """
    config = plan.config
    shards = config.dp_shard_size or 1
    if shards * (config.dp_replicate_size or 1) == 1:
        return []
    require_known_fsdp()
    alone = (config.tensor_parallel_size or 1) == 1
    problems = []
    for parameter in plan.parameters:
        what = todo = ""
        layout = parameter.layout
        fused = not alone and isinstance(layout, SegmentedLayout) and layout.dim == 0 and len(parameter.shape) > 1
        if not parameter.shape:
            what, todo = "FSDP2 cannot shard a parameter without dims", "give it the shape (1,), or pass wrap=False"
        elif fused and parameter.shape[1] % shards:
            what = (
                f"FSDP2 cuts this fused weight {parameter.shape} along dim 1, whose {parameter.shape[1]} columns "
                f"{shards} ranks do not divide"
            )
            todo = f"use a dp_shard_size that divides {parameter.shape[1]} (dp_replicate_size for the rest)"
        elif alone and not model.get_parameter(parameter.name).is_contiguous():
            what, todo = "FSDP2 cannot shard a parameter that is not contiguous", "make it so: p.data = p.contiguous()"
        if what:
            problems.append(Problem(where=parameter.name, rule="(data parallelism)", what=what, todo=todo))
    return problems


def _placement(others: Callable[[nn.Parameter], Any] | None) -> Callable[[nn.Parameter], Any]:
    return lambda p: fsdp_placement(p) or (None if others is None else others(p))


def _replicate(module: nn.Module, *, mesh: DeviceMesh, **options: Any) -> None:
    # FSDP2's engine without sharding. DistributedDataParallel cannot hold DTensor parameters.
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, **options)
