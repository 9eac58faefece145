"""What every pack is held to; the cases are in `shard_qwen.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestQwen(PolicyConformance):
    plugin = "shard_qwen.plugin"
