"""What every pack is held to; the cases are in `shard_decoders.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestDecoders(PolicyConformance):
    plugin = "shard_decoders.plugin"
