"""What every pack is held to; the cases are in `shard_bart.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestBart(PolicyConformance):
    plugin = "shard_bart.plugin"
