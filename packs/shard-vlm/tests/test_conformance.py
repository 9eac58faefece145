"""What every pack is held to; the cases are in `shard_vlm.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestVisionLanguage(PolicyConformance):
    plugin = "shard_vlm.plugin"
