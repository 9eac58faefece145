"""What every pack is held to; the cases are in `shard_deepseek.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestDeepseek(PolicyConformance):
    plugin = "shard_deepseek.plugin"
