"""Sinks under context parallelism: a number for each head, which the attention reads from its module."""

import pytest

import shardcore
from shard_decoders.cases import mixture
from shard_decoders.mixtures import GptOssPolicy
from shardcore.errors import NotSupportedError, PlanError
from shardcore_testing import text_batch

SIZES = {"num_local_experts": 5, "intermediate_size": 44, "head_dim": 16, "attn_implementation": "eager"}


class Unaware(GptOssPolicy):
    """A policy that does not say what its attention reads."""

    context = "self_attn"


def refused():
    with pytest.raises(PlanError, match="context"):
        shardcore.shard(mixture("GptOssForCausalLM", **SIZES), cp=2, policy=GptOssPolicy)
    model = shardcore.shard(mixture("GptOssForCausalLM", **SIZES), cp=2, policy=Unaware)
    with pytest.raises(NotSupportedError, match="attention of GptOssAttention reads sinks"):
        model(**text_batch(model, 0))


def test_sinks_are_refused(pool):
    pool.run(refused)
