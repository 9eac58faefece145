"""What one step takes, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

from shardcore.config import ShardConfig
from shardcore.mesh.axes import Sizes
from shardcore_planner.cards import Card
from shardcore_planner.workload import Workload

#: Operations between two ranks.
POINT_TO_POINT = ("send", "exchange")


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in one step.

    Attributes:
        phase: ``"forward"``, ``"backward"`` (with what is recomputed in it) or ``"optimizer"``.
        operation: what is done. ``"send"`` is to the rank of the next stage, or of the one before; ``"exchange"``, of
            the gradients of parameters that several ranks of a pipeline hold.
        axis: along which axis of the mesh.
        ranks: the number of ranks that take part.
        count: how many.
        bytes: of the whole tensors that are reduced, gathered, scattered or sent.
    """

    phase: str
    operation: str
    axis: str
    ranks: int
    count: int
    bytes: int

    @property
    def sent(self) -> int:
        """The bytes that each rank sends if the ranks are a ring: the least that is possible; or all, to one rank."""
        if self.operation in POINT_TO_POINT:
            return self.bytes
        rounds = 2 if self.operation == "all_reduce" else 1
        return rounds * self.bytes * (self.ranks - 1) // self.ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """What one step takes on a rank of a pipeline: of those with its stages, the one that holds most.

    Attributes:
        rank: its position in the pipeline.
        stages: the numbers of its stages.
        in_flight: the most micro-batches that are in flight in its stages at once, counted in each of them.
        held: bytes of ``parameters``, ``gradients`` and ``optimizer``, when all of them are there.
        kept: the most bytes that forwards keep for backwards, of all micro-batches in flight.
        buffers: bytes in which it receives, for every micro-batch: they stay from step to step.
        peak: the most bytes at once.
        peak_phase: when that is.
        at_peak: the bytes of that moment by `KINDS`; buffers are among the activations.
        traffic: the collectives, and what it sends along ``pp``.
        operations: as of `Estimate`, like ``calls`` and ``device``.
    """

    rank: int
    stages: tuple[int, ...]
    in_flight: int
    held: dict[str, int]
    kept: int
    buffers: int
    peak: int
    peak_phase: str
    at_peak: dict[str, int]
    traffic: tuple[Traffic, ...]
    operations: dict[str, int]
    calls: dict[str, int]
    device: dict[str, float]

    @property
    def sent(self) -> int:
        """The bytes that it sends in one step."""
        return sum(traffic.sent for traffic in self.traffic)


class Time(NamedTuple):
    """How long a step takes on a rank, in seconds.

    Attributes:
        device: what the device computes for.
        host: what the host calls that for.
        computing: both, one beside the other or one after the other.
        sending: what collectives take; those of axes without a link take nothing.
        unknown: the axes of these.
        waiting: the fraction of all in which ranks of a pipeline wait for each other.
    """

    device: float
    host: float
    computing: float
    sending: float
    unknown: tuple[str, ...]
    waiting: float

    @classmethod
    def of(cls, card: Card, rank: Estimate | RankEstimate, waiting: float) -> Self:
        """Return that of a rank."""
        calls = {phase: count * card.call for phase, count in rank.calls.items()}
        sending = {traffic: card.sending(traffic) for traffic in rank.traffic}
        return cls(
            device=sum(rank.device.values()),
            host=sum(calls.values()),
            computing=sum(card.computing(rank.device.get(phase, 0.0), host) for phase, host in calls.items()),
            sending=sum(filter(None, sending.values())),
            unknown=tuple(sorted({traffic.axis for traffic, time in sending.items() if time is None})),
            waiting=waiting,
        )

    @property
    def least(self) -> float:
        """If all that is sent is sent while something computes."""
        return max(self.computing, self.sending) / (1 - self.waiting)

    @property
    def most(self) -> float:
        """If nothing computes while something is sent."""
        return (self.computing + self.sending) / (1 - self.waiting)


class Slot(NamedTuple):
    """What a rank of a pipeline does when, in forwards of a stage.

    Attributes:
        rank: its position in the pipeline.
        stage: of which stage.
        kind: as of `shardcore_planner.timeline.Action`.
        micro_batch: of which micro-batch.
        start: when it begins.
        end: when it is done.
    """

    rank: int
    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineEstimate:
    """What one step takes in a pipeline.

    Attributes:
        schedule: by the name that users give.
        micro_batches: how many there are.
        bubble: the fraction of all ranks' time in which they wait, if a backward takes twice as long as a forward and
            nothing else takes any.
        ranks: in their order.
        slots: what each rank does when, under the same assumptions.
    """

    schedule: str
    micro_batches: int
    bubble: float
    ranks: tuple[RankEstimate, ...]
    slots: tuple[Slot, ...] = ()


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
        at_peak: the bytes of that moment by `KINDS`; temporaries are those of the optimizer's step, and activations all
            the rest, gathered weights too.
        traffic: the collectives.
        operations: by phase, additions and multiplications of products, convolutions and attention on this rank (of
            causal attention all), with what is computed again.
        calls: by phase, the operations that the host calls.
        device: by phase, the seconds that the device takes for them; empty where the workload has no card.
        pipeline: of a pipeline, what each of its ranks takes; ``kept`` is then what is in flight at most.
    """

    config: ShardConfig
    workload: Workload
    held: dict[str, int]
    kept: int
    peak: int
    peak_phase: str
    at_peak: dict[str, int]
    traffic: tuple[Traffic, ...]
    operations: dict[str, int]
    calls: dict[str, int]
    device: dict[str, float]
    pipeline: PipelineEstimate | None = None

    @property
    def sent(self) -> int:
        """The bytes that this rank sends in one step."""
        return sum(traffic.sent for traffic in self.traffic)

    @property
    def sizes(self) -> Sizes:
        """The sizes of the mesh."""
        tp, whole, shards = (self.config.tensor_parallel_size, self.config.dp_replicate_size, self.config.dp_shard_size)
        pp = self.config.pipeline_parallel_size
        cp = self.config.context_parallel_size
        return Sizes(pp=pp or 1, cp=cp or 1, tp=tp or 1, dp_replicate=whole or 1, dp_shard=shards or 1)

    @property
    def samples(self) -> int:
        """The samples of all replicas in one step."""
        return self.workload.batch * (self.config.data_parallel_size or 1)

    @property
    def time(self) -> Time | None:
        """How long a step takes; None where the workload has no card. Of a pipeline, what its slowest rank takes."""
        card = self.workload.card
        if card is None:
            return None
        ranks = (self,) if self.pipeline is None else self.pipeline.ranks
        waiting = 0.0 if self.pipeline is None else self.pipeline.bubble
        return max((Time.of(card, rank, waiting) for rank in ranks), key=lambda time: time.most)

    def fits(self, memory: int | None) -> bool | None:
        """Tell whether the peak is at most ``memory`` bytes; None if there is no limit."""
        return None if memory is None else self.peak <= memory


def traffic_of(numbers: Mapping[tuple[str, ...], int]) -> tuple[Traffic, ...]:
    """Return what numbers say of collectives: by ``("sent", phase, operation, axis, ranks, "count" or "bytes")``."""
    return tuple(
        Traffic(
            phase=phase,
            operation=operation,
            axis=axis,
            ranks=int(ranks),
            count=numbers["sent", phase, operation, axis, ranks, "count"],
            bytes=numbers["sent", phase, operation, axis, ranks, "bytes"],
        )
        for phase, operation, axis, ranks in sorted({key[1:5] for key in numbers if key[0] == "sent"})
    )
