"""Pipelines over tiny models, and what the whole model computes of the same micro-batches."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from tiny import TinyPolicy, batch
from torch import Tensor, nn

from shardcore.api import shard
from shardcore.pipeline import Pipeline
from shardcore.pipeline.engine import pipeline_of

__all__ = ["LAYERS", "close", "engine", "labelled", "pipeline", "whole_step"]

LAYERS = 4


def labelled(seed: int = 0, rows: int = 8, length: int = 8) -> dict[str, Any]:
    """Return a batch of which rows, and so micro-batches, have unequal numbers of labels; the last ones have none."""
    labels = batch(seed + 1, rows, length)
    for row in range(rows):
        labels[row, : row % length] = -100
    labels[-2:] = -100
    return {"ids": batch(seed, rows, length), "labels": labels}


def pipeline(model: nn.Module, policy: Any = TinyPolicy, **settings: Any) -> Any:
    settings = {"pp": dist.get_world_size(), "num_microbatches": 4, **settings}
    return shard(model, policy=policy, **settings)


def engine(model: Any) -> Pipeline:
    """Return what runs a model's steps."""
    return pipeline_of(model)


def whole_step(model: nn.Module, call: dict[str, Any]) -> Tensor:
    """Run forward and backward of the whole model on the whole batch."""
    loss = model(**call)
    loss.backward()
    return loss.detach()


def close(wanted: Tensor, got: Tensor, what: str, bound: float = 1e-12, scale: float = 0.0) -> None:
    wanted, got = wanted.detach(), got.detach()
    scale = scale or float(wanted.abs().max()) or 1.0
    error = float((wanted - got).abs().max()) / scale
    assert error <= bound, f"{what}: {error:.3g}"
