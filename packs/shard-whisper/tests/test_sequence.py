"""Whisper with its tokens split over the ranks, in the ways that the conformance kit leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from whisper_cases import build, inputs, loss_of, shard

from shardcore.nn.sequence.tokens import SequenceStack
from shardcore_testing.parity import assert_close, assert_same_gradients


def _pair(tp: int, **options: Any) -> tuple[Any, Any]:
    reference = build("WhisperForConditionalGeneration", **options).double().train()
    return reference, shard(copy.deepcopy(reference), tp=tp, enable_sequence_parallelism=True)


def _lengths(tp: int) -> None:
    """The encoder's number of tokens stays, the decoder's changes."""
    reference, sharded = _pair(tp, d_model=48, encoder_attention_heads=12, decoder_attention_heads=12)
    batch = inputs(reference, 0)
    for length in (7, 6, 5, 4, 3, 2, 1):
        labels = batch["labels"][1:2, :length].clamp(min=3)
        wanted, got = (model(batch["input_features"][1:2], labels=labels) for model in (reference, sharded))
        assert_close(wanted.loss, got.loss, f"loss of {length} tokens", 1e-12)
        wanted.loss.backward()
        got.loss.backward()
        last = sharded.model.decoder._tokens.last
        assert last == (length if length >= tp else None)
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_any_length(pool, tp):
    pool.run(_lengths, tp, world=tp)


def _dropped() -> None:
    """LayerDrop takes every block of the decoder: its last norm is called with all tokens."""
    reference, sharded = _pair(2, decoder_layerdrop=1.0)
    assert sum(isinstance(module, SequenceStack) for module in sharded.modules()) == 2
    batch = inputs(reference, 0)
    seen: list[Tensor] = []
    sharded.model.decoder.layer_norm.register_forward_hook(lambda module, args, out: seen.append(out))
    losses = [loss_of(model(**batch)) for model in (reference, sharded)]
    for loss in losses:
        loss.backward()
    assert_close(*losses, "loss", 1e-12)
    assert seen[0].size(1) == 7
    assert_same_gradients(reference, sharded)


def test_every_block_dropped(pool):
    pool.run(_dropped, world=2)


def _embedding() -> None:
    reference, sharded = _pair(2)
    batch = inputs(reference, 0)
    whole: list[Tensor] = []
    handle = sharded.model.decoder.embed_tokens.register_forward_hook(lambda module, args, out: whole.append(out))
    with torch.no_grad():
        loss = loss_of(sharded(**batch))
        handle.remove()
        assert_close(loss_of(sharded(**batch)), loss, "loss with a hook on the embedding", 1e-12)
    ids = batch["labels"].new_tensor([[reference.config.decoder_start_token_id]] * 3)
    assert_close(reference.model.decoder.embed_tokens(ids), whole[0][:, :1], "what a hook sees", 1e-12)


def test_a_hook_on_the_embedding_sees_all_tokens(pool):
    pool.run(_embedding, world=2)
