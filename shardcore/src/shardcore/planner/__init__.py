"""What a plan will cost, before any run. May import whatever shards; nothing but the command imports it."""

from __future__ import annotations

from shardcore.planner.communication import Collective, collectives
from shardcore.planner.estimate import KINDS, estimate
from shardcore.planner.memory import parameter_bytes
from shardcore.planner.results import Estimate, PipelineEstimate, RankEstimate, Slot, Traffic
from shardcore.planner.simulation import simulated_ranks
from shardcore.planner.stages import StagePart, stage_parts
from shardcore.planner.workload import DTYPES, OPTIMIZERS, Call, Workload

__all__ = [
    "DTYPES",
    "KINDS",
    "OPTIMIZERS",
    "Call",
    "Collective",
    "Estimate",
    "PipelineEstimate",
    "RankEstimate",
    "Slot",
    "StagePart",
    "Traffic",
    "Workload",
    "collectives",
    "estimate",
    "parameter_bytes",
    "simulated_ranks",
    "stage_parts",
]
