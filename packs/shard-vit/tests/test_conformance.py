"""What every pack is held to; the cases are in `shard_vit.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestVit(PolicyConformance):
    plugin = "shard_vit.plugin"
