"""What every pack is held to; the cases are in `shard_mistral.cases`."""

from shardcore_testing import PolicyConformance


class TestMistral(PolicyConformance):
    plugin = "shard_mistral.plugin"
