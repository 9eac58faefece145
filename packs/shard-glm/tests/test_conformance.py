"""What every pack is held to; the cases are in `shard_glm.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestGlm(PolicyConformance):
    plugin = "shard_glm.plugin"
