"""What every pack is held to; the cases are in `shard_falcon.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestFalcon(PolicyConformance):
    plugin = "shard_falcon.plugin"
