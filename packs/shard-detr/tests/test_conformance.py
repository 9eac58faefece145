"""What every pack is held to; the cases are in `shard_detr.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestDetr(PolicyConformance):
    plugin = "shard_detr.plugin"
