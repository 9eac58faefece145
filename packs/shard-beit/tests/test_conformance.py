"""What every pack is held to; the cases are in `shard_beit.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestBeit(PolicyConformance):
    plugin = "shard_beit.plugin"
