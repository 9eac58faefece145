"""What every pack is held to; the cases are in `shard_gpt2.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestGpt2(PolicyConformance):
    plugin = "shard_gpt2.plugin"
