"""The configuration by Shardformer's names: two names are one setting, and what shardcore lacks may ask for nothing."""

from __future__ import annotations

import dataclasses
import pickle
import re

import pytest

import shardcore
from shardcore.errors import ConfigError, NotSupportedError
from shardcore_shardformer import ShardConfig


def test_two_names_are_one_value():
    assert ShardConfig(gather_output=True) == ShardConfig(parallel_output=False) == ShardConfig()
    assert ShardConfig().gather_output is True
    for value in (True, False, "auto"):
        one = ShardConfig(use_flash_attention=value)
        assert one == ShardConfig(enable_flash_attention=value)
        assert one.use_flash_attention == one.enable_flash_attention == value
    assert ShardConfig(gather_output=True, parallel_output=False).parallel_output is False
    assert ShardConfig(gather_output=False) == ShardConfig(parallel_output=True)


def test_a_size_of_one_has_a_second_name():
    config = ShardConfig(enable_tensor_parallelism=False)
    assert (config, config.enable_tensor_parallelism) == (ShardConfig(tensor_parallel_size=1), False)
    assert config.resolve(4).data_parallel_size == 4
    assert ShardConfig(enable_tensor_parallelism=True, tensor_parallel_size=2).enable_tensor_parallelism is True
    for fields, message in (
        ({"enable_tensor_parallelism": "yes"}, "must be True or False, got 'yes'"),
        ({"enable_tensor_parallelism": False, "tensor_parallel_size": 2}, "=False contradicts tensor_parallel_size=2"),
    ):
        with pytest.raises(ConfigError, match=message):
            ShardConfig(**fields)


def test_a_mode_without_its_switch_says_nothing():
    fields = {"sequence_parallelism_mode": "split_gather"}
    assert ShardConfig(enable_sequence_parallelism=True, **fields) == ShardConfig(enable_sequence_parallelism=True)
    with pytest.raises(ConfigError, match="without enable_sequence_parallelism=True says nothing; give both"):
        ShardConfig(**fields)


def test_second_names_do_not_get_in_the_way():
    config = ShardConfig(use_flash_attention="auto", tensor_parallel_size=2)
    assert dataclasses.replace(config, tensor_parallel_size=4).use_flash_attention == "auto"
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(ShardConfig(enable_flash_attention="auto", tensor_parallel_size=2))
    assert isinstance(config, shardcore.ShardConfig)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"gather_output": True, "parallel_output": True},
            "ShardConfig.gather_output=True contradicts parallel_output=True: they are one setting; give one",
        ),
        (
            {"use_flash_attention": True, "enable_flash_attention": "auto"},
            (
                "ShardConfig.use_flash_attention=True contradicts enable_flash_attention='auto': they are one setting; "
                "give one"
            ),
        ),
    ],
)
def test_contradictions(fields, message):
    with pytest.raises(ConfigError) as caught:
        ShardConfig(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("field", "nothing", "something"),
    [
        ("make_vocab_size_divisible_by", None, 64),
        ("sequence_parallelism_mode", None, "ring"),
    ],
)
def test_fields_that_are_not_there(field, nothing, something):
    assert ShardConfig(**{field: nothing}) == ShardConfig()
    with pytest.raises(NotSupportedError, match=rf"^ShardConfig\.{field}={something!r} is not in shardcore .*; "):
        ShardConfig(**{field: something})
    with pytest.raises(ConfigError, match=f"unknown configuration field '{field}'"):
        shardcore.ShardConfig.of(**{field: nothing})


def test_modes_of_tensor_parallelism():
    assert ShardConfig(tensor_parallel_mode="1d") == ShardConfig()
    config = ShardConfig(tensor_parallel_mode="2d", tensor_parallel_size=4, data_parallel_size=1, gather_output=False)
    assert dataclasses.replace(config, tensor_parallel_size=9).tensor_parallel_mode == "2d"
    assert pickle.loads(pickle.dumps(config)) == config != ShardConfig(tensor_parallel_size=4, gather_output=False)
    for mode in ("2.5d", "3d"):
        with pytest.raises(NotSupportedError, match=r"nobody gains by it below hundreds of ranks\. For a product of"):
            ShardConfig(tensor_parallel_mode=mode)
    for error, said, fields in (
        (ConfigError, "must be '1d' or '2d', got '4d'", {"tensor_parallel_mode": "4d"}),
        (ConfigError, "wants a square of ranks, 4, 9 or 16, got 8", {"tensor_parallel_size": 8}),
        (ConfigError, "wants a square of ranks, 4, 9 or 16, got 1;", {"tensor_parallel_size": 1}),
        (NotSupportedError, "data_parallel_size=2 together with tensor_parallel_mode='2d'", {"data_parallel_size": 2}),
        (NotSupportedError, "inference_only=True together with", {"inference_only": True}),
        (NotSupportedError, "extra_kwargs={'a': 1} together with", {"extra_kwargs": {"a": 1}}),
    ):
        with pytest.raises(error, match=re.escape(said)):
            ShardConfig(**{"tensor_parallel_mode": "2d", **fields})
    with pytest.raises(NotSupportedError, match=r"'2d' is not for shardcore\.shard, nor for Booster"):
        config.resolve(4)
