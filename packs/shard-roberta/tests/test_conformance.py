"""What every pack is held to; the cases are in `shard_roberta.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestRoberta(PolicyConformance):
    plugin = "shard_roberta.plugin"
