"""What every pack is held to; the cases are in `shard_phi.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestPhi(PolicyConformance):
    plugin = "shard_phi.plugin"
