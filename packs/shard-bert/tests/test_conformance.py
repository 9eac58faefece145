"""What every pack is held to; the cases are in `shard_bert.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestBert(PolicyConformance):
    plugin = "shard_bert.plugin"
