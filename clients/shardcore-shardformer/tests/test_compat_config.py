"""The configuration by Shardformer's names: two names are one setting, and what shardcore lacks may ask for nothing."""

from __future__ import annotations

import dataclasses
import pickle

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
        ("tensor_parallel_mode", "1d", "2d"),
        ("enable_sequence_overlap", False, True),
        ("fp8_communication", False, True),
        ("make_vocab_size_divisible_by", None, 64),
    ],
)
def test_fields_that_are_not_there(field, nothing, something):
    assert ShardConfig(**{field: nothing}) == ShardConfig()
    with pytest.raises(NotSupportedError, match=rf"^ShardConfig\.{field}={something!r} is not in shardcore .*; "):
        ShardConfig(**{field: something})
    with pytest.raises(ConfigError, match=f"unknown configuration field '{field}'"):
        shardcore.ShardConfig.of(**{field: nothing})
