"""What every pack is held to; the cases are in `shard_albert.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestAlbert(PolicyConformance):
    plugin = "shard_albert.plugin"
