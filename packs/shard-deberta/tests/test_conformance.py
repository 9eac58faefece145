"""What every pack is held to; the cases are in `shard_deberta.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestDeberta(PolicyConformance):
    plugin = "shard_deberta.plugin"
