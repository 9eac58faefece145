"""What one step takes on one rank, computed without weights, accelerator or other ranks.

The sharded model itself is run, on tensors that hold nothing, with a few blocks of each kind. What one block more adds
is what every further one adds.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

import shardcore
from shardcore._private import PLANNING, require
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh import Sizes, context_of
from shardcore.plan import ShardPlan
from shardcore.planner.layers import Kind, kept, kinds_of, label, truncated
from shardcore.planner.memory import parameter_bytes
from shardcore.planner.simulation import Certain, simulated_ranks
from shardcore.planner.step import groups_of, run_step, still, to_fake
from shardcore.planner.watch import KINDS, Numbers, Watch
from shardcore.planner.workload import DTYPES, Call, Stepper, Workload
from shardcore.plugins.registry import default_registry
from shardcore.policy import Policy

__all__ = ["KINDS", "Estimate", "Traffic", "estimate", "least"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in one step.

    Attributes:
        phase: ``"forward"``, ``"backward"`` (with what is recomputed in it) or ``"optimizer"``.
        operation: what is done.
        axis: along which axis of the mesh.
        ranks: the number of ranks that take part.
        count: how many.
        bytes: of the whole tensors that are reduced, gathered or scattered.
    """

    phase: str
    operation: str
    axis: str
    ranks: int
    count: int
    bytes: int

    @property
    def sent(self) -> int:
        """The bytes that each rank sends if the ranks are a ring: the least that is possible."""
        rounds = 2 if self.operation == "all_reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one step takes on the rank that holds most.

    Attributes:
        config: the resolved configuration.
        workload: what the step is made of, with its number of tokens.
        held: bytes of ``parameters``, ``gradients`` and ``optimizer``, when all of them are there.
        kept: bytes that the forward keeps for the backward (of inference: that are left at its end).
        peak: the most bytes at once.
        peak_phase: when that is.
        at_peak: the bytes of that moment by `KINDS`; activations are all the rest, gathered weights and temporary
            tensors too.
        traffic: the collectives.
    """

    config: ShardConfig
    workload: Workload
    held: dict[str, int]
    kept: int
    peak: int
    peak_phase: str
    at_peak: dict[str, int]
    traffic: tuple[Traffic, ...]

    @property
    def sent(self) -> int:
        """The bytes that this rank sends in one step."""
        return sum(traffic.sent for traffic in self.traffic)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the mesh."""
        tp, whole, shards = (self.config.tensor_parallel_size, self.config.dp_replicate_size, self.config.dp_shard_size)
        return Sizes(tp=tp or 1, dp_replicate=whole or 1, dp_shard=shards or 1)

    @property
    def samples(self) -> int:
        """The samples of all replicas in one step."""
        return self.workload.batch * (self.config.data_parallel_size or 1)

    def fits(self, memory: int | None) -> bool | None:
        """Tell whether the peak is at most ``memory`` bytes; None if there is no limit."""
        return None if memory is None else self.peak <= memory


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
        NotSupportedError: the installed torch cannot do this, or later releases bring a setting.
        NoPolicyError: no installed pack serves the model.
        PlanError: it cannot be sharded so; lists every problem.
    """
    require(PLANNING)
    config = _config(config, workload)
    plan = _plan(model, config, policy)
    per_rank = parameter_bytes(plan)
    ranks, rank = config.ranks, per_rank.index(max(per_rank))  # neighbours on tp are neighbours
    called = call(model, workload)
    workload = dataclasses.replace(workload, seq=called.seq)
    lists = plan.stages.lists if plan.stages else ()
    recomputed = list(_recomputed(model, config, lists))
    kinds = kinds_of(model, lists, recomputed)

    def trace(more: Kind | None = None) -> Numbers:
        keep = kept(kinds, more)
        few = truncated(model, keep).to(DTYPES[workload.dtype])
        fewer = _recomputing(config, keep, recomputed)
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
    config = _config(config, workload)
    held = max(parameter_bytes(_plan(model, config, policy), DTYPES[workload.dtype])) // (config.dp_shard_size or 1)
    return int(held * workload.copies)


def _config(config: ShardConfig, workload: Workload) -> ShardConfig:
    if not workload.trains:
        config = ShardConfig.of(config, inference_only=True)
    if config.enable_jit_fused is True:
        raise ConfigError("blocks that are compiled cannot be planned; leave enable_jit_fused out to plan without")
    if (config.expert_parallel_size or 1) > 1:
        raise NotSupportedError(
            "expert_parallel_size cannot be planned: how many tokens travel is known when they do. Plan without it: "
            "parameters, gradients and optimizer state are the same per rank"
        )
    if (config.pipeline_parallel_size or 1) > 1:
        raise NotSupportedError(
            "a step of a pipeline cannot be planned yet: plan a model of the blocks of one stage (config.num_layers), "
            "times the micro-batches that its schedule keeps"
        )
    return config.resolve(config.ranks)


def _plan(model: nn.Module, config: ShardConfig, policy: type[Policy] | None = None) -> ShardPlan:
    if policy is not None:  # the packs are looked at only if it delegates
        delegates = lambda cls: default_registry().policy_for(cls)  # noqa: E731  # called late
        return compile_plan(policy, model, config, delegates=delegates, device_type="cpu")
    registry = default_registry()
    found, origin = registry.policy_for(type(model))
    return compile_plan(
        found,
        model,
        config,
        origin=origin,
        modules=registry.modules_for(config),
        delegates=registry.policy_for,
        device_type="cpu",
    )


def _recomputed(model: nn.Module, config: ShardConfig, lists: Iterable[str]) -> Iterator[str]:
    """Yield the names of the blocks that are recomputed in the backward."""
    if (switch := config.gradient_checkpoint_config) is not None:
        for name in lists:
            yield from (f"{name}.{i}" for i in range(switch.blocks(len(list(model.get_submodule(name).children())))))


def _recomputing(config: ShardConfig, keep: dict[str, list[int]], recomputed: list[str]) -> ShardConfig:
    """Return the configuration that recomputes, of the blocks that are kept, those that are recomputed of all."""
    if config.gradient_checkpoint_config is None:
        return config
    counts = {sum(f"{name}.{index}" in recomputed for index in indices) for name, indices in keep.items()}
    if all(f"{name}.{index}" in recomputed for name, indices in keep.items() for index in indices):
        every = GradientCheckpointConfig(gradient_checkpointing_ratio=1.0)
        return ShardConfig.of(config, gradient_checkpoint_config=every)
    if len(counts) > 1:
        raise ConfigError(
            "a part of the blocks is recomputed, of several lists: that cannot be planned; recompute all or none"
        )
    return ShardConfig.of(config, gradient_checkpoint_config=GradientCheckpointConfig(num_ckpt_layers=counts.pop()))


def _trace(model: Any, workload: Workload, call: Call, kinds: list[Kind], keep: dict[str, list[int]]) -> Numbers:
    """Run a step of the sharded few blocks on tensors that hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    context = context_of(model)
    if context is not None:
        still(context)
    model.train(workload.trains)
    places = {
        label(kinds, name, index, indices): model.get_submodule(f"{name}.{number}")
        for name, indices in keep.items()
        for number, index in enumerate(indices)
    }
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, Certain():
        to_fake(model)
        stepper = Stepper(model, workload)
        found = run_step(model, call, stepper, workload, Watch(fake), places)
    groups = groups_of(context)
    named: Numbers = Counter()
    for key, size in found.items():
        if key[0] == "sent":
            axis, ranks = groups[key[3]]
            named[*key[:3], axis, str(ranks), key[4]] += size
        else:
            named[key] += size
    return named


def _extrapolated(trace: Callable[[Kind | None], Numbers], kinds: list[Kind]) -> Numbers:
    """Return what the whole model takes."""
    base = trace(None)
    whole: Numbers = Counter(base)
    for kind in kinds:
        if kind.left_out:
            more = trace(kind)
            for key in {*base, *more}:
                whole[key] += kind.left_out * (more[key] - base[key])
    return whole


def _estimate(config: ShardConfig, workload: Workload, numbers: Numbers) -> Estimate:
    peaks = {key: size for key, size in numbers.items() if key[0] == "peak" and key[3] == "all"}
    _, phase, place, _ = top = max(peaks, key=lambda key: peaks[key])
    sent = sorted({key[1:5] for key in numbers if key[0] == "sent"})
    return Estimate(
        config=config,
        workload=workload,
        held={kind: numbers["held", kind] for kind in KINDS[:3]},
        kept=numbers["kept",],
        peak=peaks[top],
        peak_phase=phase,
        at_peak={kind: numbers["peak", phase, place, kind] for kind in KINDS},
        traffic=tuple(
            Traffic(
                phase=phase,
                operation=operation,
                axis=axis,
                ranks=int(ranks),
                count=numbers["sent", phase, operation, axis, ranks, "count"],
                bytes=numbers["sent", phase, operation, axis, ranks, "bytes"],
            )
            for phase, operation, axis, ranks in sent
        ),
    )
