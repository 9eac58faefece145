"""What is said where no kit is there that infers policies."""

from __future__ import annotations

import importlib.util

import pytest
from tiny import build

import shardcore
from shardcore.errors import ConfigError


def test_the_kit_that_infers_is_named(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *at: None if "scaffold" in name else find(name, *at))
    with pytest.raises(ConfigError, match="policy='infer' is of shardcore-scaffold, which is not installed"):
        shardcore.shard(build(), policy="infer")
