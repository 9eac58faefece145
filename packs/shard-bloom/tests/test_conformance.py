"""What every pack is held to; the cases are in `shard_bloom.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestBloom(PolicyConformance):
    plugin = "shard_bloom.plugin"
