"""What every pack is held to; the cases are in `shard_swin.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestSwin(PolicyConformance):
    plugin = "shard_swin.plugin"
