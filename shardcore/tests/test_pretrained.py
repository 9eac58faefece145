"""What `shardcore.from_pretrained` says where there is no library of models."""

from __future__ import annotations

import sys

import pytest

import shardcore
from shardcore.errors import ConfigError


def test_without_transformers(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for module in ("client", "loading"):
        monkeypatch.delitem(sys.modules, f"shardcore_transformers.{module}", raising=False)
    with pytest.raises(
        ConfigError,
        match="shardcore-transformers, the client for transformers, cannot be imported: ModuleNotFoundError",
    ):
        shardcore.from_pretrained("LlamaForCausalLM", tmp_path)
