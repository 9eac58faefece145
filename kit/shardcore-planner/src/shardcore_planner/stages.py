"""What each stage of a pipeline holds, read off a plan."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from shardcore.pipeline.schedules import SCHEDULES
from shardcore.plan import ParameterPlan, ShardPlan
from shardcore.plan.cut import Cut, shares
from shardcore_planner.memory import bytes_on, local_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """What one stage holds.

    Attributes:
        stage: its number.
        rank: its rank on ``pp``.
        blocks: the names of its blocks.
        parts: what else it holds, by the names of `Stages`.
        shared: its parameters that other stages hold too: each with these stages.
        parameters: how many numbers a tensor-parallel rank has in its parameters, at most.
        bytes: those of these parameters; data axes divide them further by ``dp_shard``.
        share: its share in the work of all stages, counted by parameters that are multiplied.
    """

    stage: int
    rank: int
    blocks: tuple[str, ...]
    parts: tuple[str, ...]
    shared: dict[str, tuple[int, ...]]
    parameters: int
    bytes: int
    share: float


def placed(plan: ShardPlan, cut: Cut) -> list[int]:
    """Return the rank on ``pp`` of each stage."""
    config = plan.config
    schedule = SCHEDULES[config.pipeline_schedule or "1f1b"]
    return schedule.ranks(len(cut), config.pipeline_parallel_size or 1)


def stage_parts(model: nn.Module, plan: ShardPlan) -> list[StagePart]:
    """Return what each stage holds.

    Args:
        model: the unsharded model, on any device.
        plan: its plan.

    Raises:
        ConfigError: it cannot be cut so.
        NotSupportedError: its policy does not say where it can be cut.
    """
    cut = Cut.by(plan.config, model, plan.stages)
    ranks, tensor = placed(plan, cut), plan.config.tensor_parallel_size or 1
    found = []
    for stage, (rank, share) in enumerate(zip(ranks, shares(model, cut), strict=True)):
        own = [parameter for parameter in plan.parameters if stage in _holders(parameter, cut)]
        numbers = [sum(math.prod(local_shape(p, tensor, part)) for p in own) for part in range(tensor)]
        found.append(
            StagePart(
                stage=stage,
                rank=rank,
                blocks=tuple(cut.blocks[block] for block in cut.held(stage)),
                parts=tuple(name for name in cut.parts() if name not in cut.blocks and _holds(cut, stage, name)),
                shared={p.name: tuple(sorted(held)) for p in own if len(held := _holders(p, cut)) > 1},
                parameters=max(numbers),
                bytes=max(sum(bytes_on(p, tensor, part) for p in own) for part in range(tensor)),
                share=share,
            )
        )
    return found


def parameter_bytes_by_stage(plan: ShardPlan, cut: Cut, dtype: torch.dtype | None = None) -> list[list[int]]:
    """Return the bytes of parameters on each rank of ``pp``, there on each of ``tp``; see `parameter_bytes`."""
    ranks, tensor = placed(plan, cut), plan.config.tensor_parallel_size or 1
    on = [(p, {ranks[stage] for stage in _holders(p, cut)}) for p in plan.parameters]
    return [
        [sum(bytes_on(p, tensor, part, dtype) for p, held in on if rank in held) for part in range(tensor)]
        for rank in range(plan.config.pipeline_parallel_size or 1)
    ]


def _holders(parameter: ParameterPlan, cut: Cut) -> set[int]:
    """Return the stages that hold a parameter under any of its names."""
    held = {cut.holder(entry) for entry in parameter.held_by}
    return set(range(len(cut))) if None in held else {stage for stage in held if stage is not None}


def _holds(cut: Cut, stage: int, name: str) -> bool:
    return cut.holder(name) in (stage, None)
