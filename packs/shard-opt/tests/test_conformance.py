"""What every pack is held to; the cases are in `shard_opt.cases`."""

from __future__ import annotations

from shardcore_testing import PolicyConformance


class TestOpt(PolicyConformance):
    plugin = "shard_opt.plugin"
