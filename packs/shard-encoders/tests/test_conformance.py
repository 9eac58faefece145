"""What every pack is held to; the cases are in `shard_encoders.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestEncoders(PolicyConformance):
    plugin = "shard_encoders.plugin"
