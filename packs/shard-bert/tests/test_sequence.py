"""BERT with its tokens split over the ranks, in the ways that the conformance kit leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bert_cases import CROSS, build, compare, loss_of, shard
from torch import Tensor

import shardcore
from shardcore.transfer import products
from shardcore_testing.parity import assert_close, assert_same_gradients

WAYS: dict[str, dict[str, Any]] = {
    "gathered again": {"sequence_keep_gathered": False},
    "deferred": {"partial_gradients": "deferred"},
    "both": {"sequence_keep_gathered": False, "partial_gradients": "deferred"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertLMHeadModel"])
@pytest.mark.parametrize("way", WAYS)
def test_training(pool, name, way):
    pool.run(_training, name, WAYS[way], world=2)


def _training(name: str, fields: dict[str, Any]) -> None:
    reference = build(name, **(CROSS if name == "BertLMHeadModel" else {}))
    sharded = shard(copy.deepcopy(reference), tp=2, enable_sequence_parallelism=True, **fields)
    compare(reference, sharded)
    if "partial_gradients" in fields:
        shardcore.reduce_partial_gradients(sharded)
    assert_same_gradients(reference, sharded)


def _in_pieces() -> None:
    fields = {"enable_sequence_parallelism": True, "enable_sequence_overlap": True}
    reference = build("BertForMaskedLM")
    sharded = shard(copy.deepcopy(reference), tp=2, **fields)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_ROWS", 4)
        compare(reference, sharded)
    assert_same_gradients(reference, sharded)


def test_an_mlp_s_own_region_in_pieces(pool):
    pool.run(_in_pieces, world=2)


def _ids(rows: int, length: int) -> dict[str, Tensor]:
    ids = torch.arange(rows * length).view(rows, length).mul(7).add(3) % 90
    mask = torch.ones_like(ids)
    mask[0, length - 1 :] = 0 if length > 1 else 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2, "labels": ids % 11}


def _lengths(tp: int) -> None:
    reference = build("BertForMaskedLM", num_attention_heads=12, hidden_size=48)
    sharded = shard(copy.deepcopy(reference), tp=tp, enable_sequence_parallelism=True)
    for length in (8, 7, 5, 4, 3, 2, 1):
        wanted, got = (model(**_ids(3, length)) for model in (reference, sharded))
        assert_close(wanted.loss, got.loss, f"loss of {length} tokens", 1e-12)
        wanted.loss.backward()
        got.loss.backward()
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_any_length(pool, tp):
    pool.run(_lengths, tp, world=tp)


def _embeddings() -> None:
    reference = build("BertModel", num_hidden_layers=1)
    sharded = shard(copy.deepcopy(reference), tp=2, enable_sequence_parallelism=True)
    inputs = {k: v for k, v in _ids(3, 7).items() if k != "labels"}
    wanted = loss_of(reference(**inputs))
    wanted.backward()
    seen: list[Tensor] = []
    around = ("embeddings", "embeddings.dropout", "embeddings.word_embeddings", "embeddings.LayerNorm")
    for place, tokens in {**dict.fromkeys(around, 7), "encoder.layer.0": 4}.items():
        sharded.zero_grad()
        handle = sharded.get_submodule(place).register_forward_hook(
            lambda module, args, out: seen.append(out[0] if isinstance(out, tuple) else out)
        )
        got = loss_of(sharded(**inputs))
        handle.remove()
        assert seen[-1].size(1) == tokens, place
        assert_close(wanted, got, f"loss with a hook on {place}", 1e-12)
        got.backward()
        assert_same_gradients(reference, sharded)
    embedded = reference.embeddings(**{k: v for k, v in inputs.items() if k != "attention_mask"})
    for out in seen[:2]:
        assert_close(embedded, out, "what a hook sees", 1e-12)


def test_hooks_on_the_embeddings(pool):
    pool.run(_embeddings, world=2)


def _captured() -> None:
    reference = build("BertModel", attn_implementation="eager")
    sharded = shard(copy.deepcopy(reference), tp=2, enable_sequence_parallelism=True)
    inputs = {k: v for k, v in _ids(3, 7).items() if k != "labels"}
    outs = [model(**inputs, output_hidden_states=True) for model in (reference, sharded)]
    for wanted, got in zip(*(out.hidden_states for out in outs), strict=True):
        assert_close(wanted, got, "hidden states", 1e-12)
    for out in outs:
        sum((t * torch.arange(t.numel()).view_as(t).cos()).sum() for t in out.hidden_states).backward()
    assert_same_gradients(reference, sharded)


def test_captured_outputs(pool):
    pool.run(_captured, world=2)


def _by_hand() -> None:
    """A checkpoint around the call of the first block."""
    reference = build("BertModel")
    sharded = shard(copy.deepcopy(reference), tp=2, enable_sequence_parallelism=True)
    inputs = {k: v for k, v in _ids(3, 7).items() if k != "labels"}
    for model in (reference, sharded):
        first = model.encoder.layer[0]
        native = type(first).__call__

        def call(x: Tensor, *args: Any, native: Any = native, first: Any = first, **kwargs: Any) -> Any:
            return torch.utils.checkpoint.checkpoint(native, first, x, *args, use_reentrant=False, **kwargs)

        model.encoder.layer[0] = _Called(call)
        loss_of(model(**inputs)).backward()
        model.encoder.layer[0] = first
    assert_same_gradients(reference, sharded)


class _Called(torch.nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def test_a_checkpoint_by_hand(pool):
    pool.run(_by_hand, world=2)
