"""What every pack is held to; the cases are in `shard_hybrids.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestHybrids(PolicyConformance):
    plugin = "shard_hybrids.plugin"
