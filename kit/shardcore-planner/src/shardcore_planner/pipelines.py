"""What one step of a pipeline takes on each of its ranks.

Of each rank its own stages run, with a few blocks of each kind (`shardcore_planner.rank_step`), and the schedule says
how many micro-batches are in flight while they do (`shardcore_planner.timeline`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

import shardcore
from shardcore.config import ShardConfig
from shardcore.config.pipelining import chunks_of
from shardcore.errors import ConfigError
from shardcore.pipeline.microbatches import rows_of_each
from shardcore.pipeline.schedules import SCHEDULES
from shardcore.plan.cut import Cut, shares
from shardcore.policy import Policy
from shardcore_planner.layers import LEAST, Kind, kept, kinds_of, label, truncated
from shardcore_planner.levels import rank_estimate
from shardcore_planner.preparing import adapted, planned, recomputed, recomputing
from shardcore_planner.rank_step import run_rank
from shardcore_planner.results import Estimate, PipelineEstimate, RankEstimate
from shardcore_planner.simulation import simulated_ranks
from shardcore_planner.stages import parameter_bytes_by_stage, placed
from shardcore_planner.timeline import bubble, forwards, orders, slots
from shardcore_planner.watch import Numbers
from shardcore_planner.workload import Call, Workload


def estimate_pipeline(
    model: nn.Module,
    config: ShardConfig,
    workload: Workload,
    call: Callable[[nn.Module, Workload], Call],
    *,
    policy: type[Policy] | None = None,
) -> Estimate:
    """Return what one step takes; see `shardcore_planner.estimate`.

    Args:
        model: the unsharded model, on the meta device.
        config: how it is sharded, resolved.
        workload: what each replica does in a step.
        call: says how a model is called.
        policy: a policy's class.
    """
    pipeline = _Pipeline(model, config, workload, call, policy)
    ranks = tuple(map(pipeline.rank, range(pipeline.size)))
    most = max(ranks, key=lambda found: found.peak)
    return Estimate(
        config=config,
        workload=pipeline.workload,
        held=most.held,
        kept=most.kept,
        peak=most.peak,
        peak_phase=most.peak_phase,
        at_peak=most.at_peak,
        traffic=most.traffic,
        operations=most.operations,
        calls=most.calls,
        device=most.device,
        pipeline=PipelineEstimate(
            schedule=config.pipeline_schedule or "1f1b",
            micro_batches=pipeline.number,
            bubble=bubble(pipeline.orders, pipeline.costs),
            ranks=ranks,
            slots=tuple(slots(pipeline.orders, pipeline.costs)),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Blocks:
    """Blocks of one kind in one stage.

    Attributes:
        stage: which stage.
        number: of the kind, among all of the model.
        kind: the blocks.
    """

    stage: int
    number: int
    kind: Kind


class _Pipeline:
    """The plan of one pipeline.

    Attributes:
        workload: with its number of tokens.
        number: of micro-batches.
        size: how many ranks the pipeline has.
        orders: what each of them does.
        costs: of a forward of each stage.
    """

    def __init__(
        self,
        model: nn.Module,
        config: ShardConfig,
        workload: Workload,
        call: Callable[[nn.Module, Workload], Call],
        policy: type[Policy] | None,
    ) -> None:
        self._model, self._config, self._call, self._policy = model, config, call, policy
        plan = planned(model, config, policy)
        self._cut = Cut.by(plan.config, model, plan.stages)
        self.workload = dataclasses.replace(workload, seq=call(model, workload).seq)
        schedule = SCHEDULES[config.pipeline_schedule or "1f1b"]
        chunks = chunks_of(config.pipeline_schedule, config.num_model_chunks)
        self.size = config.pipeline_parallel_size or 1
        number = None if config.microbatch_size is not None else config.num_microbatches or 2 * self.size
        self._rows = rows_of_each(workload.batch, number=number, size=config.microbatch_size)
        self.number, left = divmod(workload.batch, self._rows)
        if left:
            raise ConfigError(
                f"a batch of {workload.batch} rows is planned in micro-batches of equally many, and {self._rows} rows "
                "leave a smaller one; plan with a batch that they divide"
            )
        self.orders = (orders if workload.trains else forwards)(schedule, self.size, chunks, self.number)
        self.costs = dict(enumerate(shares(model, self._cut)))
        self._placed = placed(plan, self._cut)
        self._held = parameter_bytes_by_stage(plan, self._cut)
        self._lists = self._cut.stages.lists
        self._recomputed = list(recomputed(model, config, self._lists))
        self._blocks = list(self._kinds())
        self._traced: dict[tuple[object, ...], tuple[Numbers, list[Numbers]]] = {}

    def rank(self, rank: int) -> RankEstimate:
        """Return what a rank takes."""
        own = [blocks for blocks in self._blocks if self._placed[blocks.stage] == rank]
        signature = self._signature(rank, own)
        if signature not in self._traced:
            more = [self._trace(rank, own, blocks) for blocks in own if blocks.kind.left_out]
            self._traced[signature] = self._trace(rank, own), more
        base, more = self._traced[signature]
        whole: Numbers = Counter(base)
        for blocks, found in zip((blocks for blocks in own if blocks.kind.left_out), more, strict=True):
            for key in base:  # it has all places but that of what was added
                whole[key] += blocks.kind.left_out * (found[key] - base[key])
        return rank_estimate(rank, self._placed, self.orders[rank], self.number, whole, trains=self.workload.trains)

    def _kinds(self) -> Iterator[_Blocks]:
        """Yield the kinds of blocks in each stage."""
        for number, kind in enumerate(kinds_of(self._model, self._lists, self._recomputed)):
            start = self._starts()[kind.blocks]
            for stage in range(len(self._cut)):
                indices = tuple(index for index in kind.indices if start + index in self._cut.held(stage))
                if indices:
                    yield _Blocks(stage, number, Kind(blocks=kind.blocks, indices=indices))

    def _starts(self) -> dict[str, int]:
        """Return how many blocks come before those of each list."""
        sizes = [len(list(self._model.get_submodule(name).children())) for name in self._lists]
        return dict(zip(self._lists, itertools.accumulate([0, *sizes]), strict=False))

    def _signature(self, rank: int, own: list[_Blocks]) -> tuple[object, ...]:
        """Return what the numbers of a rank follow from, besides how many further blocks of a kind there are."""
        held = self._held[rank]
        told: list[object] = [held.index(max(held))]
        for position, stage in enumerate(stage for stage, of in enumerate(self._placed) if of == rank):
            kinds = [(b.number, min(LEAST, len(b.kind.indices))) for b in own if b.stage == stage]
            after = {b.number for b in self._blocks if b.stage == stage + 1}
            parts = [name for name in self._cut.parts() if name not in self._cut.blocks]
            around = [name for name in parts if self._cut.holder(name) in (stage, None)]
            told.append((position, stage == 0, tuple(kinds), tuple(sorted(after)), tuple(around)))
        return tuple(told)

    def _trace(self, rank: int, own: list[_Blocks], more: _Blocks | None = None) -> Numbers:
        """Run the stages of a rank, each with few blocks of each kind, and all others with one."""
        kinds = [blocks.kind for blocks in self._blocks]
        here = [blocks.kind for blocks in own]
        keep = kept(kinds, None if more is None else more.kind, here)
        few = adapted(truncated(self._model, keep).to(self.workload.torch_dtype), self.workload)
        fewer = ShardConfig.of(recomputing(self._config, keep, self._recomputed), pipeline_bounds=self._bounds(keep))
        held = self._held[rank]
        first = self._config.ranks // self.size * rank  # the first axis of a mesh is pp, and the last one tp
        with simulated_ranks(self._config.ranks, first + held.index(max(held))):
            shardcore.shard(few, fewer, policy=self._policy)
            places = [
                (label(kinds, name, index, indices), few.get_submodule(f"{name}.{number}"))
                for name, indices in keep.items()
                for number, index in enumerate(indices)
                if any(kind.blocks == name and index in kind.indices for kind in here)
            ]
            return run_rank(few, self.workload, self._call, self._rows, places)

    def _bounds(self, keep: dict[str, list[int]]) -> tuple[int, ...]:
        """Return where the stages begin among the blocks that are kept."""
        starts = self._starts()
        there = [starts[name] + index for name in self._lists for index in keep[name]]
        return tuple(bisect.bisect_left(there, bound) for bound in self._cut.bounds)
