"""Meshes of a number of ranks, and which of them a step fits on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from shardcore.config import ShardConfig
from shardcore.errors import ConfigError, PlanError
from shardcore.mesh.axes import Sizes
from shardcore.policy import Policy
from shardcore_planner.estimating import estimate, least
from shardcore_planner.results import Estimate
from shardcore_planner.workload import Call, Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One mesh: what a step takes on it, or why there is none.

    Attributes:
        sizes: of its axes.
        estimate: what a step takes; None if it cannot be sharded so, or what stays from step to step is too large.
        problem: why not.
    """

    sizes: Sizes
    estimate: Estimate | None = None
    problem: str = ""


def meshes(ranks: int, max_tp: int) -> Iterator[Sizes]:
    """Yield every mesh of ``ranks`` ranks with at most ``max_tp`` on ``tp``."""
    for tp in range(1, min(ranks, max_tp) + 1):
        if ranks % tp == 0:
            replicas = ranks // tp
            for whole in range(1, replicas + 1):
                if replicas % whole == 0:
                    yield Sizes(tp=tp, dp_replicate=whole, dp_shard=replicas // whole)


def search(
    model: nn.Module,
    config: ShardConfig,
    workload: Workload,
    call: Callable[[nn.Module, Workload], Call],
    *,
    ranks: int,
    max_tp: int,
    memory: int | None = None,
    policy: type[Policy] | None = None,
) -> Iterator[Found]:
    """Yield what one step takes on every mesh of ``ranks`` ranks; see `shardcore_planner.estimate.estimate`.

    Args:
        model: the unsharded model, on the meta device.
        config: the rest of the configuration.
        workload: what each replica does in a step.
        call: says how a model is called.
        ranks: the number of all ranks.
        max_tp: the most tensor-parallel ranks, such as those of one host.
        memory: bytes of a rank; a mesh on which less than a step exceeds them is not looked at more closely.
        policy: a policy's class, used instead of looking for one among the installed packs.

    Raises:
        ShardcoreError: what has nothing to do with the mesh.
    """
    for sizes in meshes(ranks, max_tp):
        here = ShardConfig.of(
            config,
            tensor_parallel_size=sizes.tp,
            dp_replicate_size=sizes.dp_replicate,
            dp_shard_size=sizes.dp_shard,
        )
        try:
            if memory is not None and (bound := least(model, here, workload, policy=policy)) > memory:
                problem = f"parameters, gradients and optimizer state alone take {bound / 2**30:.1f} GiB of each rank"
                yield Found(sizes=sizes, problem=problem)
                continue
            yield Found(sizes=sizes, estimate=estimate(model, here, workload, call, policy=policy))
        except PlanError as error:
            yield Found(sizes=sizes, problem=str(error))


def ordered(found: list[Found], memory: int | None) -> list[Found]:
    """Return the meshes that fit, by what a sample of the whole job costs; ties by the peak."""
    fitting = [f for f in found if f.estimate is not None and f.estimate.fits(memory) is not False]
    by = seconds if timed(found) else cost
    return sorted(fitting, key=lambda f: (by(f), f.estimate.peak if f.estimate else 0))


def timed(found: Iterable[Found]) -> bool:
    """Tell whether the time of all that is sent is known on every mesh."""
    times = [f.estimate.time for f in found if f.estimate is not None]
    return bool(times) and all(time is not None and not time.unknown for time in times)


def seconds(found: Found) -> float:
    """Return the most time that a sample of all replicas takes."""
    if found.estimate is None or found.estimate.time is None:
        raise ConfigError("a mesh without an estimate, or without a card, has no time")
    return found.estimate.time.most / found.estimate.samples


def cost(found: Found) -> float:
    """Return the bytes that each rank sends in a step, divided by the samples of all replicas."""
    if found.estimate is None:
        raise ConfigError("a mesh without an estimate has no cost")
    return found.estimate.sent / found.estimate.samples
