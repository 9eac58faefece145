"""What every pack is held to; the cases are in `shard_dinov2.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestDinov2(PolicyConformance):
    plugin = "shard_dinov2.plugin"
