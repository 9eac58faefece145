"""What a user asks for: `ShardConfig`, its rules, and how many blocks are recomputed."""

from __future__ import annotations

from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.config.shard_config import ShardConfig

__all__ = ["GradientCheckpointConfig", "ShardConfig"]
