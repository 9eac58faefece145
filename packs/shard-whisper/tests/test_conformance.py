"""What every pack is held to; the cases are in `shard_whisper.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestWhisper(PolicyConformance):
    plugin = "shard_whisper.plugin"
