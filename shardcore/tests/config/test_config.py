from __future__ import annotations

import dataclasses

import pytest

from shardcore.config import ShardConfig
from shardcore.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel_size": 0}, "ShardConfig.tensor_parallel_size must be a positive integer or None, got 0"),
        ({"tensor_parallel_size": 2.0}, "ShardConfig.tensor_parallel_size must be a positive integer or None, got 2.0"),
        ({"dp_shard_size": True}, "ShardConfig.dp_shard_size must be a positive integer or None, got True"),
        ({"data_parallel_size": -1}, "ShardConfig.data_parallel_size must be a positive integer or None, got -1"),
        (
            {"partial_gradients": "late"},
            "ShardConfig.partial_gradients must be one of 'in_backward', 'deferred', got 'late'",
        ),
        (
            {"data_parallel_size": 4, "dp_replicate_size": 2, "dp_shard_size": 3},
            (
                "ShardConfig.data_parallel_size 4 is not dp_replicate_size 2 times dp_shard_size 3; leave one of the "
                "three None"
            ),
        ),
    ],
)
def test_values_that_cannot_be(fields, message):
    with pytest.raises(ConfigError) as caught:
        ShardConfig(**fields)
    assert str(caught.value) == message


def _sizes(config):
    return tuple(
        getattr(config, name)
        for name in ("tensor_parallel_size", "data_parallel_size", "dp_replicate_size", "dp_shard_size")
    )


@pytest.mark.parametrize(
    ("fields", "world", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 4, (4, 1, 1, 1)),
        ({"tp": 2}, 4, (2, 2, 1, 2)),
        ({"dp": 2}, 8, (4, 2, 1, 2)),
        ({"tp": 2, "dp_replicate_size": 2}, 8, (2, 4, 2, 2)),
        ({"dp_shard_size": 2}, 8, (4, 2, 1, 2)),
        ({"dp_shard_size": 2, "dp_replicate_size": 2}, 8, (2, 4, 2, 2)),
        ({"dp": 4, "dp_shard_size": 1}, 4, (1, 4, 4, 1)),
        ({"dp_replicate_size": 2}, 4, (2, 2, 2, 1)),
        ({"ep": 2}, 4, (2, 2, 1, 2)),
        ({"tp": 2, "ep": 2}, 8, (2, 4, 1, 4)),
        ({"dp_replicate_size": 2, "dp_shard_size": 2, "ep": 2}, 4, (1, 4, 2, 2)),
    ],
)
def test_sizes_are_filled_in(fields, world, sizes):
    resolved = ShardConfig.of(**fields).resolve(world)
    assert _sizes(resolved) == sizes
    assert resolved.resolve(world) == resolved


@pytest.mark.parametrize(
    ("fields", "world", "message"),
    [
        (
            {"tp": 3},
            4,
            (
                "tensor_parallel_size 3 times data_parallel_size 1 is 3, but there are 4 ranks; start 3 ranks "
                "(torchrun --nproc-per-node 3 ...) or change the sizes"
            ),
        ),
        (
            {"tp": 2},
            1,
            (
                "tensor_parallel_size 2 times data_parallel_size 1 is 2, but there is 1 rank; start 2 ranks (torchrun "
                "--nproc-per-node 2 ...) or change the sizes"
            ),
        ),
        (
            {"tp": 2, "ep": 2},
            2,
            "expert_parallel_size 2 does not divide dp_shard_size 1: experts are shared",
        ),
        ({"tp": 1, "dp": 4, "dp_shard_size": 3}, 4, "dp_replicate_size 1 times dp_shard_size 3 is 3, but"),
    ],
)
def test_sizes_that_do_not_fit(fields, world, message):
    with pytest.raises(ConfigError) as caught:
        ShardConfig.of(**fields).resolve(world)
    assert str(caught.value).startswith(message)


def test_the_least_number_of_ranks_has_those_that_share_experts():
    assert ShardConfig.of(ep=4).ranks == 4
    assert ShardConfig.of(ep=2, tp=2).ranks == 4
    assert ShardConfig.of(ep=2, dp=4).ranks == 4


def test_short_names():
    assert ShardConfig.of(tp=2, dp=3) == ShardConfig(tensor_parallel_size=2, data_parallel_size=3)
    base = ShardConfig(tensor_parallel_size=2, partial_gradients="deferred")
    assert ShardConfig.of(base, tp=4) == dataclasses.replace(base, tensor_parallel_size=4)
    assert base.tensor_parallel_size == 2
    with pytest.raises(ConfigError, match=r"unknown configuration field .tensor_size.[.] Did you mean .[a-z_]+.[?]$"):
        ShardConfig.of(tensor_size=2)
    with pytest.raises(ConfigError, match="'tensor_parallel_size' and another name for tensor_parallel_size were both"):
        ShardConfig.of(tp=2, tensor_parallel_size=2)
