"""What every pack is held to; the cases are in `shard_ernie.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestErnie(PolicyConformance):
    plugin = "shard_ernie.plugin"
