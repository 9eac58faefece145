"""What every pack is held to; the cases are in `shard_wav2vec2.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestWav2vec2(PolicyConformance):
    plugin = "shard_wav2vec2.plugin"
