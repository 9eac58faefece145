"""What the kit does not ask of CLIP and SigLIP: features by themselves, and replicas that share a scale of logits."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from shard_clip.cases import build, inputs
from shardcore_testing import no_float32_islands
from shardcore_testing.pack import shard_by
from shardcore_testing.parity import assert_close, assert_same_gradients

PLUGIN = "shard_clip.plugin"


@pytest.mark.parametrize("name", ["CLIPModel", "SiglipModel"])
def test_features(pool, name):
    pool.run(_features, name, world=2)


@no_float32_islands()
def _features(name: str) -> None:
    reference = build(name).train()
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    batch = inputs(reference, 0)
    images = {"pixel_values": batch["pixel_values"]}
    text = {key: batch[key] for key in ("input_ids", "attention_mask")}
    for method, given in (("get_image_features", images), ("get_text_features", text)):
        wanted, got = (_pooled(getattr(model, method)(**given)) for model in (reference, sharded))
        assert_close(wanted, got, method)
        for features in (wanted, got):
            features.square().mean().backward()
    assert_same_gradients(reference, sharded)


def _pooled(features: Any) -> torch.Tensor:
    # Before 5.0 the features were returned themselves.
    return features if isinstance(features, torch.Tensor) else features.pooler_output
