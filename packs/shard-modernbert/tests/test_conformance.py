"""What every pack is held to; the cases are in `shard_modernbert.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestModernbert(PolicyConformance):
    plugin = "shard_modernbert.plugin"
