"""What every pack is held to; the cases are in `shard_t5.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestT5(PolicyConformance):
    plugin = "shard_t5.plugin"
