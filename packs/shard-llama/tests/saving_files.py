"""What the tests of saving share: sizes, and reading what was saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

TP2, TP4, DP2 = {"tp": 2}, {"tp": 4}, {"dp": 2}
SQUARE = {"tp": 2, "dp": 2}
HYBRID = {"dp_replicate_size": 2, "dp_shard_size": 2}
REPLICAS = {"tp": 2, "dp_replicate_size": 2, "dp_shard_size": 1}

ODD = {"vocab_size": 97, "num_key_value_heads": 2, "attention_bias": False, "mlp_bias": False, "dtype": torch.float32}
TIED = {**ODD, "tie_word_embeddings": True}


def saved(folder: str | Path) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint, read as its index says."""
    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return load_file(folder / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(folder / name) for name in set(where.values())}
    assert sorted(where) == sorted(name for tensors in files.values() for name in tensors)
    return {name: files[file][name] for name, file in where.items()}


def weights(model: Any) -> dict[str, Tensor]:
    """Return what transformers would save of the unsharded ``model``."""
    dropped = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    return {name: tensor for name, tensor in model.state_dict().items() if name not in dropped}


def assert_saved(folder: str | Path, wanted: dict[str, Tensor]) -> None:
    got = saved(folder)
    assert got.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert got[name].dtype == tensor.dtype, name
        assert torch.equal(got[name], tensor), name


def names_in(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())
