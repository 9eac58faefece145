"""What every pack is held to; the cases are in `shard_gpt_neo.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestGptNeo(PolicyConformance):
    plugin = "shard_gpt_neo.plugin"
