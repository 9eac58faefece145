"""What every pack is held to; the cases are in `shard_sam.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestSam(PolicyConformance):
    plugin = "shard_sam.plugin"
