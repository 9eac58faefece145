"""What every pack is held to; the cases are in `shard_gemma.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestGemma(PolicyConformance):
    plugin = "shard_gemma.plugin"
