"""What a user asks for: `ShardConfig`, its rules, and how many blocks are recomputed."""

from __future__ import annotations

from shardcore.config.recomputation import GradientCheckpointConfig, PipelineGradientCheckpointConfig
from shardcore.config.shard_config import ShardConfig
from shardcore.config.stage_manager import PipelineStageManager

__all__ = ["GradientCheckpointConfig", "PipelineGradientCheckpointConfig", "PipelineStageManager", "ShardConfig"]
