"""What the kit does not ask of Wav2Vec2: what it draws at random, alike on all ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2GumbelVectorQuantizer

import shardcore
from shard_wav2vec2.cases import build, inputs
from shardcore.errors import PlanError
from shardcore_testing import hidden_loss, no_float32_islands
from shardcore_testing.pack import policy_of, shard_by, step_beside
from shardcore_testing.parity import assert_same_gradients

PLUGIN = "shard_wav2vec2.plugin"

#: SpecAugment of times and of features, and layers that are left out.
DRAWN: dict[str, Any] = {
    "mask_time_prob": 0.4,
    "mask_time_length": 2,
    "mask_feature_prob": 0.3,
    "mask_feature_length": 5,
    "layerdrop": 0.4,
}


def _loss(out: Any) -> torch.Tensor:
    return out.loss if "loss" in out else hidden_loss(out)


@pytest.mark.parametrize("name", ["Wav2Vec2ForCTC", "Wav2Vec2Model"])
def test_ranks_mask_and_leave_out_the_same(pool, name):
    pool.run(_drawn, name, world=2)


def _drawn(name: str) -> None:
    adapter = {"add_adapter": True} if name == "Wav2Vec2Model" else {}
    model = shard_by(PLUGIN, build(name, **DRAWN, **adapter).train())
    batch = inputs(model, 0)
    batch.pop("mask_time_indices", None)
    np.random.seed(dist.get_rank())  # the generator that transformers draws from
    torch.manual_seed(dist.get_rank())
    losses = []
    for _ in range(8):
        losses.append(_loss(model(**batch)))
        losses[-1].backward()
    mine = torch.stack(losses).detach()
    assert len(mine.unique()) > 4, "nothing is drawn"
    everyones = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyones, mine)
    assert torch.equal(*everyones)


@pytest.mark.parametrize("fields", [{"tp": 1, "dp": 2}, {"tp": 2, "enable_sequence_parallelism": True}])
def test_layers_that_are_left_out_are_refused(pool, fields):
    pool.run(_refused, fields, world=2)


def _refused(fields: dict[str, Any]) -> None:
    model = build("Wav2Vec2ForCTC", layerdrop=0.1)
    with pytest.raises(PlanError, match=r"config\.layerdrop is 0\.1"):
        shardcore.shard(model, policy=policy_of(PLUGIN, model), **fields)


def test_pretraining_draws_vectors(pool):
    pool.run(_pretraining, world=2)


@no_float32_islands()
def _pretraining() -> None:
    reference = build("Wav2Vec2ForPreTraining")
    reference.quantizer.__class__ = Wav2Vec2GumbelVectorQuantizer
    reference.train()
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    with patch.object(nn.functional, "gumbel_softmax", _same_noise):
        for seed in range(2):
            step_beside(reference, sharded, inputs(reference, seed), _loss)
    assert_same_gradients(reference, sharded)
    assert reference.quantizer.weight_proj.weight.grad.abs().max() > 0


def test_masked_sound_of_wavlm(pool):
    pool.run(_masked, world=2)


def _masked() -> None:
    reference = build("WavLMForCTC", stable=True).train()
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    batch = inputs(build("Wav2Vec2ForCTC", stable=True), 0)
    assert not batch["attention_mask"].all()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched key_padding_mask", UserWarning)
        step_beside(reference, sharded, batch, _loss)
    assert_same_gradients(reference, sharded)


def _same_noise(logits: torch.Tensor, tau: float = 1, hard: bool = False) -> torch.Tensor:
    """What torch computes, with the same noise in every call."""
    noise = torch.rand(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    soft = torch.softmax((logits - torch.log(-torch.log(noise))) / tau, dim=-1)
    chosen = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
    return chosen - soft.detach() + soft
