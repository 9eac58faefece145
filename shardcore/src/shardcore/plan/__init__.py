"""The plan as data: its steps, where a model can be cut, how it is printed and compared."""

from __future__ import annotations

from shardcore.plan.digest import Choice
from shardcore.plan.shard_plan import ParameterPlan, PartPlan, ShardPlan
from shardcore.plan.stages import Stages

__all__ = ["Choice", "ParameterPlan", "PartPlan", "ShardPlan", "Stages"]
