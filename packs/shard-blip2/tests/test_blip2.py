"""What the kit does not ask of BLIP-2: features by themselves, captions without a prompt, the forward it replaces."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from transformers.models.blip_2.modeling_blip_2 import Blip2Attention

from shard_blip2.cases import build, inputs
from shardcore_testing import no_float32_islands
from shardcore_testing.pack import shard_by
from shardcore_testing.parity import assert_close, assert_same_gradients

PLUGIN = "shard_blip2.plugin"


def test_upstream_still_counts_heads_in_two_ways():
    # If this fails, see whether `shard_blip2.attention.attend` is needed, and computes what the new forward does.
    source = " ".join(inspect.getsource(Blip2Attention.forward).split())
    assert "bsz, tgt_len, embed_dim = hidden_states.size()" in source
    assert (
        "mixed_qkv.reshape(bsz, tgt_len, 3, self.num_heads, embed_dim // self.num_heads).permute( 2, 0, 3, 1, 4 )"
        in source
    )
    assert (
        "attention_mask=None, dropout=0.0 if not self.training else self.attention_dropout, scaling=self.scale,"
        in source
    )
    assert source.endswith(
        "attn_output = attn_output.reshape(bsz, tgt_len, -1).contiguous() "
        "attn_output = self.projection(attn_output) return attn_output, attn_weights"
    )


@pytest.mark.parametrize("language", ["opt", "t5"])
def test_features(pool, language):
    pool.run(_features, language, world=2)


@no_float32_islands()
def _features(language: str) -> None:
    reference = build("Blip2Model", language=language).train()
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    batch = inputs(reference, 0)
    images = {"pixel_values": batch["pixel_values"]}
    text = {key: batch[key] for key in ("input_ids", "attention_mask")}
    calls = {"get_image_features": images, "get_qformer_features": images, "get_text_features": text}
    for method, given in calls.items():
        wanted, got = (_states(getattr(model, method)(**given)) for model in (reference, sharded))
        assert_close(wanted, got, method)
        for features in (wanted, got):
            features.square().mean().backward()
    assert_same_gradients(reference, sharded)


def _states(features: Any) -> torch.Tensor:
    return features if isinstance(features, torch.Tensor) else features.last_hidden_state


@pytest.mark.parametrize("language", ["opt", "t5"])
def test_captions_without_a_prompt(pool, language):
    pool.run(_captions, language, world=2)


@no_float32_islands()
def _captions(language: str) -> None:
    reference = build("Blip2ForConditionalGeneration", language=language).eval()
    sharded = shard_by(PLUGIN, copy.deepcopy(reference))
    images = inputs(reference, 0)["pixel_values"]
    for way in ({}, {"num_beams": 3}):
        wanted, got = (m.generate(images, max_new_tokens=6, do_sample=False, **way) for m in (reference, sharded))
        assert torch.equal(wanted, got), way
    features = [m.get_image_features(images).pooler_output for m in (reference, sharded)]
    assert_close(*features, "what the language model is told of the image")
