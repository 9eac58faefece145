"""What a plan will cost, before any run.

May import whatever shards; nothing of the core imports it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardcore_planner.communication import Collective, collectives
    from shardcore_planner.estimating import KINDS, estimate
    from shardcore_planner.memory import parameter_bytes
    from shardcore_planner.results import Estimate, PipelineEstimate, RankEstimate, Slot, Traffic
    from shardcore_planner.simulation import simulated_ranks
    from shardcore_planner.stages import StagePart, stage_parts
    from shardcore_planner.workload import DTYPES, OPTIMIZERS, Call, Workload

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

_HOME = {
    "Call": "shardcore_planner.workload",
    "Collective": "shardcore_planner.communication",
    "DTYPES": "shardcore_planner.workload",
    "Estimate": "shardcore_planner.results",
    "KINDS": "shardcore_planner.estimating",
    "OPTIMIZERS": "shardcore_planner.workload",
    "PipelineEstimate": "shardcore_planner.results",
    "RankEstimate": "shardcore_planner.results",
    "Slot": "shardcore_planner.results",
    "StagePart": "shardcore_planner.stages",
    "Traffic": "shardcore_planner.results",
    "Workload": "shardcore_planner.workload",
    "collectives": "shardcore_planner.communication",
    "estimate": "shardcore_planner.estimating",
    "parameter_bytes": "shardcore_planner.memory",
    "simulated_ranks": "shardcore_planner.simulation",
    "stage_parts": "shardcore_planner.stages",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Load a public name on first use (PEP 562): commands say what they do without torch."""
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
