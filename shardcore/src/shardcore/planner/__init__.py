"""What a plan will cost, before any run. May import `shardcore.plan.shard_plan` and below."""

from __future__ import annotations

from shardcore.planner.communication import Collective, collectives
from shardcore.planner.memory import parameter_bytes

__all__ = ["Collective", "collectives", "parameter_bytes"]
