"""What one step takes on one rank, computed without weights, accelerator or other ranks.

The sharded model itself is run, on tensors that hold nothing, with a few blocks of each kind. What one block more adds
is what every further one adds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import nn

import shardcore
from shardcore.config import ShardConfig
from shardcore.mesh.context import context_of
from shardcore.plan.cut import Cut
from shardcore.policy import Policy
from shardcore_planner._private import TORCH
from shardcore_planner.layers import Kind, kept, kinds_of, label, truncated
from shardcore_planner.memory import parameter_bytes
from shardcore_planner.pipelines import estimate_pipeline
from shardcore_planner.preparing import adapted, configured, planned, recomputed, recomputing
from shardcore_planner.results import Estimate, traffic_of
from shardcore_planner.simulation import holding_nothing, simulated_ranks
from shardcore_planner.stages import parameter_bytes_by_stage
from shardcore_planner.step import by_axis, run_step, still, to_fake
from shardcore_planner.watch import KINDS, Numbers, Watch
from shardcore_planner.workload import Call, Stepper, Workload

__all__ = ["KINDS", "estimate", "least"]


def estimate(
    model: nn.Module,
    config: ShardConfig,
    workload: Workload,
    call: Callable[[nn.Module, Workload], Call],
    *,
    policy: type[Policy] | None = None,
) -> Estimate:
    """Return what one step of ``model`` takes on the rank that holds most.

    Args:
        model: the unsharded model, on the meta device; it is not changed.
        config: how it is sharded.
        workload: what the step is made of.
        call: says how a model is called.
        policy: a policy's class, used instead of looking for one among the installed packs.

    Raises:
        ConfigError: the process has a process group, or the model cannot be called so.
        NotSupportedError: the installed torch cannot do this, or settings do not work together.
        NoPolicyError: no installed pack serves the model.
        PlanError: it cannot be sharded so; lists every problem.
    """
    TORCH.require()
    workload = workload.of(model)
    config = configured(config, workload)
    if (config.pipeline_parallel_size or 1) > 1:
        return estimate_pipeline(model, config, workload, call, policy=policy)
    plan = planned(model, config, policy)
    per_rank = parameter_bytes(plan)
    ranks, rank = config.ranks, per_rank.index(max(per_rank))  # neighbours on tp are neighbours
    called = call(model, workload)
    workload = dataclasses.replace(workload, seq=called.seq)
    lists = plan.stages.lists if plan.stages else ()
    names = list(recomputed(model, config, lists))
    kinds = kinds_of(model, lists, names)

    def trace(more: Kind | None = None) -> Numbers:
        keep = kept(kinds, more)
        few = adapted(truncated(model, keep).to(workload.torch_dtype), workload)
        fewer = recomputing(config, keep, names)
        with simulated_ranks(ranks, rank):
            shardcore.shard(few, fewer, policy=policy)
            return _trace(few, workload, call(few, workload), kinds, keep)

    numbers = _extrapolated(trace, kinds)
    return _estimate(config, workload, numbers)


def least(model: nn.Module, config: ShardConfig, workload: Workload, *, policy: type[Policy] | None = None) -> int:
    """Return what stays from step to step on the rank that holds most, with gradients, in bytes, without a trace.

    Raises:
        ShardcoreError: what `estimate` raises.
    """
    workload = workload.of(model)
    config = configured(config, workload)
    plan = planned(model, config, policy)
    dtype = workload.torch_dtype
    if (config.pipeline_parallel_size or 1) > 1:
        held = max(map(max, parameter_bytes_by_stage(plan, Cut.by(plan.config, model, plan.stages), dtype)))
    else:
        held = max(parameter_bytes(plan, dtype))
    return int(held // (config.dp_shard_size or 1) * workload.copies)


def _trace(model: Any, workload: Workload, call: Call, kinds: list[Kind], keep: dict[str, list[int]]) -> Numbers:
    """Run a step of the sharded few blocks on tensors that hold nothing."""
    context = context_of(model)
    if context is not None:
        still(context)
    model.train(workload.trains)
    places = [
        (label(kinds, name, index, indices), model.get_submodule(f"{name}.{number}"))
        for name, indices in keep.items()
        for number, index in enumerate(indices)
    ]
    with holding_nothing(workload.device) as fake:
        to_fake(model)
        stepper = Stepper(model, workload)
        found = run_step(model, call, stepper, workload, Watch(fake, workload.card), places)
    return by_axis(found, context)


def _extrapolated(trace: Callable[[Kind | None], Numbers], kinds: list[Kind]) -> Numbers:
    """Return what the whole model takes."""
    base = trace(None)
    whole: Numbers = Counter(base)
    for kind in kinds:
        if kind.left_out:
            more = trace(kind)
            for key in base:  # it has all places but that of what was added
                whole[key] += kind.left_out * (more[key] - base[key])
    return whole


def _estimate(config: ShardConfig, workload: Workload, numbers: Numbers) -> Estimate:
    peaks = {key: size for key, size in numbers.items() if key[0] == "peak" and key[3] == "all"}
    _, phase, place, _ = top = max(peaks, key=lambda key: peaks[key])
    return Estimate(
        config=config,
        workload=workload,
        held={kind: numbers["held", kind] for kind in KINDS[:3]},
        kept=numbers["kept",],
        peak=peaks[top],
        peak_phase=phase,
        at_peak={kind: numbers["peak", phase, place, kind] for kind in KINDS},
        traffic=traffic_of(numbers),
        operations=_by_phase(numbers, "operations"),
        calls=_by_phase(numbers, "calls"),
        device={phase: count / 1e9 for phase, count in _by_phase(numbers, "device").items()},
    )


def _by_phase(numbers: Numbers, what: str) -> dict[str, int]:
    return {key[1]: count for key, count in numbers.items() if key[0] == what}
