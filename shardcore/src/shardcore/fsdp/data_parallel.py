"""The data axes: FSDP2 block by block, over a model that was sharded along ``tp`` (or not at all)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from shardcore.agree.agreement import is_alone
from shardcore.comm.dtensor_params import is_packed
from shardcore.comm.strided import fsdp_placement
from shardcore.errors import NotSupportedError, Problem
from shardcore.fsdp.same_units import SameUnits
from shardcore.fsdp.scalars import replicate_scalars
from shardcore.mesh import ShardContext, Sizes, axis_name
from shardcore.nn import SegmentedLayout
from shardcore.nn.experts.expert_parallel import ExpertParallel
from shardcore.nn.fsdp_units import prepare_units, require_known_fsdp
from shardcore.plan import ShardPlan
from shardcore.policy import Stages

__all__ = ["apply_data_parallel", "data_axes", "unwrappable"]


def apply_data_parallel(model: nn.Module, context: ShardContext, stages: Stages | None, **options: Any) -> nn.Module:
    """Apply FSDP2 to every block and to the rest of ``model``, in place.

    Without replicas it does nothing, unless ``options`` say what it is to do besides, such as computing in bfloat16.

    ``dp_shard`` shards parameters, gradients and optimizer state (`torch.distributed.fsdp.fully_shard`);
    ``dp_replicate`` keeps whole copies whose gradients are averaged; both together are hybrid sharding. Any part of the
    model may be called by itself afterwards (`shardcore.nn.fsdp_units`).

    Args:
        model: the model, sharded along ``tp`` before.
        context: its context.
        stages: names the list of blocks; without it the model is wrapped as one.
        **options: of ``fully_shard`` (``mp_policy``, ``offload_policy``, ``reshard_after_forward``,
            ``shard_placement_fn``, which is not asked about fused weights).
    """
    sizes = Sizes.of(context.parameters)
    if sizes.replicas == 1 and not options:
        return model
    wide, axes = _wide(context), data_axes(context)
    mesh = context.parameters[axes]
    ignored = (*replicate_scalars(model, context, axes), *filter(is_packed, model.parameters()))
    options["ignored_params"] = {*(options.get("ignored_params") or ()), *ignored}
    gathers = wide != ("dp_replicate",)
    wrap: Callable[..., Any] = fully_shard if gathers else _replicate
    if wrap is fully_shard and any(fsdp_placement(p) for p in model.parameters()):
        others = options.get("shard_placement_fn")
        options["shard_placement_fn"] = lambda p: fsdp_placement(p) or (None if others is None else others(p))
    lists = stages.lists if stages else ()
    blocks = [block for name in lists for block in model.get_submodule(name).children()]
    blocks = [block for block in blocks if any(True for _ in block.parameters())]  # else of another stage of a pipeline
    if sizes.pp > 1 and wrap is fully_shard:
        options.setdefault("reshard_after_forward", False)  # see `shardcore.fsdp.accumulation`
    reshards = options.get("reshard_after_forward") is not False
    experts = [module for module in model.modules() if isinstance(module, ExpertParallel)]
    meet = None if is_alone() or mesh.size() == 1 else SameUnits(model, mesh, gathers=gathers)
    for unit in prepare_units(model, [*experts, *blocks], reshards=reshards, meet=meet):
        if isinstance(unit.module, ExpertParallel) and context.experts is not None:
            fully_shard(unit.module, mesh=context.experts[wide], **_of_experts(unit.module, options))
        else:
            wrap(unit.module, mesh=mesh, **options)
        unit.watch()
    model.__dict__["__deepcopy__"] = _refuse_to_be_copied  # of the instance: FSDP2's class has its own
    return model


def _refuse_to_be_copied(memo: Any) -> NoReturn:
    raise NotSupportedError(
        "a model with data parallelism cannot be copied: FSDP2 holds its parameters. Build and shard a second one in "
        "the same way, and give it the weights: second.load_state_dict(model.state_dict()). For a mean of the weights, "
        "call after each step torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)(list(second.parameters()), "
        "list(model.parameters()), None)"
    )


def data_axes(context: ShardContext) -> tuple[str, ...]:
    """Return the names that the mesh of parameters has for the data axes that FSDP2 is applied over."""
    return tuple(axis_name(context.parameters, axis) or axis for axis in _wide(context))


def _wide(context: ShardContext) -> tuple[str, ...]:
    sizes = Sizes.of(context.parameters)
    found = (("dp_replicate", sizes.dp_replicate), ("dp_shard", sizes.dp_shard))
    return tuple(axis for axis, size in found if size > 1) or ("dp_shard",)


def _of_experts(module: ExpertParallel, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of FSDP2 for a module of whole experts, which stands in a block of its own."""
    dims = {id(p): module.dim_of_data(name) for name, p in module._parameters.items() if p is not None}
    own = {**options, "shard_placement_fn": lambda p: Shard(dims[id(p)])}
    if (policy := options.get("mp_policy")) is not None:
        # What the block computes in full precision, the weights of a token's experts, comes as it is.
        own["mp_policy"] = dataclasses.replace(policy, cast_forward_inputs=False, output_dtype=None)
    return own


def unwrappable(model: nn.Module, plan: ShardPlan) -> list[Problem]:
    """Return what FSDP2 would refuse of ``model`` once it is sharded by ``plan``, after it was changed.

    Raises:
        NotSupportedError: the installed torch has an FSDP2 that shardcore does not know.
    """
    config = plan.config
    shards = config.parameter_shards
    if shards * (config.dp_replicate_size or 1) == 1:
        return []
    require_known_fsdp()
    alone = (config.tensor_parallel_size or 1) == 1
    problems = []
    for parameter in plan.parameters:
        what = todo = ""
        layout = parameter.layout
        fused = not alone and isinstance(layout, SegmentedLayout) and layout.dim == 0 and len(parameter.shape) > 1
        if (
            not parameter.shape
            and getattr(layout, "partial_gradient", False)
            and config.partial_gradients == "deferred"
        ):
            what = "FSDP2 cannot shard a parameter without dims, whose gradient would stay partial until it is summed"
            todo = "give it the shape (1,), or leave partial_gradients='in_backward'"
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


def _replicate(module: nn.Module, *, mesh: DeviceMesh, **options: Any) -> None:
    # FSDP2's engine without sharding. DistributedDataParallel cannot hold DTensor parameters.
    from torch.distributed._composable.replicate_with_fsdp import replicate

    replicate(module, mesh=mesh, **options)
