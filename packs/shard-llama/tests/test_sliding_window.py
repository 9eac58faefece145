"""Layers with a sliding window beside layers with full attention, over split tokens: a model that Llama's rows fit."""

from __future__ import annotations

import copy

import pytest
import torch
from llama_cases import compare_forward
from transformers import Qwen2Config, Qwen2ForCausalLM

import shardcore
from shard_llama.policy import LlamaPolicy
from shardcore_testing.parity import assert_same_gradients


def _mixed(tp, attention):
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=48,
        intermediate_size=37,
        num_hidden_layers=3,
        num_attention_heads=12,
        num_key_value_heads=12,
        vocab_size=97,
        sliding_window=4,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        use_sliding_window=True,
        attn_implementation=attention,
    )
    reference = Qwen2ForCausalLM(config).double()
    sharded = shardcore.shard(
        copy.deepcopy(reference), tp=tp, policy=LlamaPolicy, enable_sequence_parallelism=True
    ).train()
    for seed, length in enumerate((13, 9, 2)):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 97, (3, length), generator=generator)
        mask = torch.ones_like(ids)
        mask[1, length - length // 5 :] = 0  # less than a window: eager attention of nothing is NaN, unsharded too
        labels = ids.masked_fill(mask == 0, -100)
        compare_forward(reference, sharded, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert_same_gradients(reference, sharded)
    # The window is looked through: without it the model computes something else.
    unlike = copy.deepcopy(config)
    unlike.layer_types = ["full_attention"] * 3
    full = Qwen2ForCausalLM(unlike).double()
    full.load_state_dict(reference.state_dict())
    ids = torch.arange(13).unsqueeze(0)
    assert not torch.allclose(full(ids).logits, reference(ids).logits)
    torch.testing.assert_close(sharded.eval()(ids).logits, reference.eval()(ids).logits, rtol=0, atol=1e-9)


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_windows_and_full_attention(pool, tp, attention):
    pool.run(_mixed, tp, attention, world=tp)
