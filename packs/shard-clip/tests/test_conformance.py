"""What every pack is held to; the cases are in `shard_clip.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestClip(PolicyConformance):
    plugin = "shard_clip.plugin"
