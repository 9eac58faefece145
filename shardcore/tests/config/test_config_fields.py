"""Every field of the configuration works; none is ignored."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from shardcore.config import ShardConfig
from shardcore.config.recomputation import GradientCheckpointConfig
from shardcore.errors import ConfigError, NotSupportedError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"partial_gradients": "ring"}, "partial_gradients must be one of 'in_backward', 'deferred', got 'ring'"),
        ({"inference_only": 1}, "inference_only must be True or False, got 1"),
        (
            {"enable_fused_normalization": "on"},
            "enable_fused_normalization must be True, False, 'auto' or None, got 'on'",
        ),
        ({"enable_jit_fused": 0}, "enable_jit_fused must be True, False, 'auto' or None, got 0"),
        ({"pipeline_parallel_size": 0}, "pipeline_parallel_size must be a positive integer or None, got 0"),
        ({"device_mesh": 2}, "device_mesh must be a DeviceMesh or None, got 2"),
        (
            {"gradient_checkpoint_config": 0.5},
            "gradient_checkpoint_config must be a GradientCheckpointConfig or None, got 0.5",
        ),
        ({"extra_kwargs": [1]}, "extra_kwargs must be a mapping of names to values, got [1]"),
        (
            {"tensor_parallel_process_group": 3},
            "tensor_parallel_process_group must be a process group that this rank belongs to, or None, got 3",
        ),
    ],
)
def test_values_of_the_wrong_kind(fields, message):
    with pytest.raises(ConfigError) as caught:
        ShardConfig(**fields)
    assert str(caught.value) == f"ShardConfig.{message}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"loss_chunk_size": 128},
            (
                "ShardConfig.loss_chunk_size=128 without parallel_output=True: gathered logits are not computed in "
                "chunks; give both or neither"
            ),
        ),
        (
            {"enable_sequence_overlap": True},
            (
                "ShardConfig.enable_sequence_overlap without enable_sequence_parallelism=True says nothing: no tokens "
                "travel; give both or neither"
            ),
        ),
        (
            {"inference_only": True, "gradient_checkpoint_config": GradientCheckpointConfig(num_ckpt_layers=1)},
            (
                "ShardConfig.gradient_checkpoint_config contradicts inference_only=True: without a backward there is "
                "nothing to recompute; give one of them"
            ),
        ),
    ],
)
def test_contradictions(fields, message):
    with pytest.raises(ConfigError) as caught:
        ShardConfig(**fields)
    assert str(caught.value) == message


def test_a_backward_that_is_split_overlaps_nothing():
    tokens = {"enable_sequence_parallelism": True, "enable_sequence_overlap": True}
    pipeline = {"pipeline_parallel_size": 2, "pipeline_schedule": "zbv"}
    with pytest.raises(NotSupportedError, match="enable_sequence_overlap together with pipeline_parallel_size=2"):
        ShardConfig(**tokens, **pipeline)
    ShardConfig(**tokens, **pipeline | {"pipeline_schedule": "1f1b"})


def test_all_optimization_asks_for_what_is_possible():
    config = ShardConfig(enable_all_optimization=True, enable_fused_normalization=False).resolve(1)
    assert (config.enable_flash_attention, config.enable_jit_fused) == ("auto", "auto")
    assert config.enable_fused_normalization is False  # said explicitly
    assert config.enable_sequence_parallelism is False
    kept = ShardConfig(enable_all_optimization=True, enable_flash_attention=True).resolve(1)
    assert kept.enable_flash_attention is True
    plain = ShardConfig().resolve(1)
    assert (plain.enable_flash_attention, plain.enable_jit_fused) == (False, False)
    assert plain.enable_fused_normalization is None  # weights of 16 bits decide
    assert ShardConfig.of(ShardConfig(), enable_all_optimization=True).resolve(1).enable_flash_attention == "auto"


def test_every_field_is_documented():
    described = inspect.getdoc(ShardConfig)
    for field in dataclasses.fields(ShardConfig):
        assert f"    {field.name}: " in described, field.name


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "num_ckpt_layers or num_ckpt_layers_per_stage, one of them; got None, None and None"),
        (
            {"gradient_checkpointing_ratio": 0.5, "num_ckpt_layers": 1},
            "num_ckpt_layers or num_ckpt_layers_per_stage, one of them; got 0.5, 1 and None",
        ),
        (
            {"gradient_checkpointing_ratio": 1.5},
            "gradient_checkpointing_ratio must be a number from 0 to 1, got 1.5",
        ),
        (
            {"gradient_checkpointing_ratio": float("nan")},
            "gradient_checkpointing_ratio must be a number from 0 to 1, got nan",
        ),
        ({"num_ckpt_layers": -1}, "num_ckpt_layers must be an integer of at least 0, got -1"),
        ({"num_ckpt_layers": 1.0}, "num_ckpt_layers must be an integer of at least 0, got 1.0"),
        ({"num_ckpt_layers": 1, "num_ckpt_layers_per_stage": [1]}, "one of them; got None, 1 and [1]"),
        ({"num_ckpt_layers_per_stage": [1, -1]}, "integers of at least 0"),
        ({"num_ckpt_layers_per_stage": [0.5]}, "integers of at least 0"),
        ({"num_ckpt_layers_per_stage": "12"}, "integers of at least 0"),
    ],
)
def test_checkpointing_that_cannot_be(fields, message):
    with pytest.raises(ConfigError) as caught:
        GradientCheckpointConfig(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "total", "blocks"),
    [
        ({"gradient_checkpointing_ratio": 0.5}, 5, 2),
        ({"gradient_checkpointing_ratio": 0.5}, 7, 3),
        ({"gradient_checkpointing_ratio": 0.3}, 10, 3),
        ({"gradient_checkpointing_ratio": 0.29}, 100, 29),
        ({"gradient_checkpointing_ratio": 1 / 3}, 12, 4),
        ({"gradient_checkpointing_ratio": 5 / 6}, 12, 10),
        ({"gradient_checkpointing_ratio": 1}, 7, 7),
        ({"gradient_checkpointing_ratio": 0.0}, 7, 0),
        ({"num_ckpt_layers": 3}, 4, 3),
    ],
)
def test_how_many_blocks_are_recomputed(fields, total, blocks):
    assert GradientCheckpointConfig(**fields).blocks(total) == blocks


def test_blocks_of_each_stage():
    config = GradientCheckpointConfig(num_ckpt_layers_per_stage=[2, 0])
    assert config.of_stages([2, 1]) == (2, 0)
    for held in ([1, 1], [2, 1, 1]):
        with pytest.raises(ConfigError, match=r"num_ckpt_layers_per_stage is \(2, 0\), but the stages have"):
            config.of_stages(held)


def test_more_blocks_than_there_are():
    with pytest.raises(ConfigError) as caught:
        GradientCheckpointConfig(num_ckpt_layers=5).blocks(4)
    assert str(caught.value) == "GradientCheckpointConfig.num_ckpt_layers is 5, but the model has 4 blocks"


def test_an_unknown_field_is_met_with_the_nearest_one():
    with pytest.raises(
        ConfigError,
        match=r"unknown configuration field 'enable_flash_atention'\. Did you mean 'enable_flash_attention'\?",
    ):
        ShardConfig.of(enable_flash_atention=True)
