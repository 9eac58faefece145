"""What a plan will cost, before any run. May import whatever shards; nothing but the command imports it."""

from __future__ import annotations

from shardcore.planner.communication import Collective, collectives
from shardcore.planner.estimate import KINDS, Estimate, Traffic, estimate
from shardcore.planner.memory import parameter_bytes
from shardcore.planner.simulation import simulated_ranks
from shardcore.planner.workload import DTYPES, OPTIMIZERS, Call, Workload

__all__ = [
    "DTYPES",
    "KINDS",
    "OPTIMIZERS",
    "Call",
    "Collective",
    "Estimate",
    "Traffic",
    "Workload",
    "collectives",
    "estimate",
    "parameter_bytes",
    "simulated_ranks",
]
