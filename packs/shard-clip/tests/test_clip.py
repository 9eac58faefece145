"""What the kit does not ask of CLIP and SigLIP: features by themselves, and replicas that share a scale of logits."""

from __future__ import annotations

import copy
import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardcore
from shard_clip.cases import build, cases, inputs
from shardcore.errors import PlanError
from shardcore.testing import no_float32_islands
from shardcore.testing.checks import examine
from shardcore.testing.pack import policy_of, shard_by
from shardcore.testing.parity import assert_close, assert_same_gradients
from shardcore.testing.subject import Subject

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


def test_replicas_refuse_a_scale_without_dims(pool):
    pool.run(_refused, world=2)


def _refused() -> None:
    model = build("CLIPModel")
    with pytest.raises(PlanError, match=r"logit_scale: FSDP2 cannot shard a parameter without dims"):
        shardcore.shard(model, policy=policy_of(PLUGIN, model), tp=1, dp=2)


@pytest.mark.parametrize(("section", "tp"), [("data parallel", 1), ("data parallel", 2), ("resume", 2)])
def test_a_scale_of_one_dim_has_replicas(pool, section, tp):
    case = dataclasses.replace(cases()[0], build=partial(_of_one_dim, "CLIPModel"))
    for finding in examine(pool, Subject(case=case, tp=tp, plugin=PLUGIN), section):
        assert finding.state == "passed", finding.explained()


def _of_one_dim(name: str, **options: Any) -> Any:
    model = build(name, **options)
    model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
    return model
