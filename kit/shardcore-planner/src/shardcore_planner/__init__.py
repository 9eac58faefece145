"""What a plan will cost, before any run.

May import whatever shards; nothing of the core imports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardcore._lazy import on_first_use

if TYPE_CHECKING:
    from shardcore_planner.cards import Card, Link
    from shardcore_planner.communication import Collective, collectives
    from shardcore_planner.estimating import KINDS, estimate
    from shardcore_planner.memory import parameter_bytes
    from shardcore_planner.results import Estimate, PipelineEstimate, RankEstimate, Slot, Time, Traffic
    from shardcore_planner.simulation import simulated_ranks
    from shardcore_planner.stages import StagePart, stage_parts
    from shardcore_planner.workload import DTYPES, OPTIMIZERS, Call, Workload

__all__ = [
    "DTYPES",
    "KINDS",
    "OPTIMIZERS",
    "Call",
    "Card",
    "Collective",
    "Estimate",
    "Link",
    "PipelineEstimate",
    "RankEstimate",
    "Slot",
    "StagePart",
    "Time",
    "Traffic",
    "Workload",
    "collectives",
    "estimate",
    "parameter_bytes",
    "simulated_ranks",
    "stage_parts",
]

if not TYPE_CHECKING:
    __getattr__ = on_first_use(
        __name__,
        {
            "shardcore_planner.cards": ("Card", "Link"),
            "shardcore_planner.communication": ("Collective", "collectives"),
            "shardcore_planner.estimating": ("KINDS", "estimate"),
            "shardcore_planner.memory": ("parameter_bytes",),
            "shardcore_planner.results": ("Estimate", "PipelineEstimate", "RankEstimate", "Slot", "Time", "Traffic"),
            "shardcore_planner.simulation": ("simulated_ranks",),
            "shardcore_planner.stages": ("StagePart", "stage_parts"),
            "shardcore_planner.workload": ("DTYPES", "OPTIMIZERS", "Call", "Workload"),
        },
    )
