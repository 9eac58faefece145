"""What every pack is held to; the cases are in `shard_blip2.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestBlip2(PolicyConformance):
    plugin = "shard_blip2.plugin"
