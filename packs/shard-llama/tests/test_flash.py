"""Flash attention on two ranks, through transformers' own functions, with plain ones in the place of kernels."""

from __future__ import annotations

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers.integrations.flash_attention as around
import transformers.modeling_flash_attention_utils as kernels
from llama_cases import BEFORE_5_5, batch, build, shard
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from shardcore_testing.parity import assert_close, assert_same_gradients
from shardcore_transformers import _attention

pytestmark = pytest.mark.skipif(BEFORE_5_5, reason="transformers looks for kernels in another way before 5.5")
_calls: list[str] = []


def _plain(query, key, value, *, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=None):
    """Attention of (rows, tokens, heads, features), as a kernel of flash-attn returns it."""
    assert (query.shape[1], window_size, softcap) == (key.shape[1], (-1, -1), None)
    _calls.append("whole")
    heads = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    out = scaled_dot_product_attention(
        *heads, dropout_p=dropout_p, is_causal=causal, scale=softmax_scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def _rows(query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal):
    """Attention of (tokens, heads, features), of rows that lie behind each other and begin at ``cu_seqlens_q``."""
    assert cu_seqlens_q.equal(cu_seqlens_k)
    parts = [tensor.tensor_split(cu_seqlens_q[1:-1].tolist()) for tensor in (query, key, value)]
    assert max(map(len, parts[0])) == max_seqlen_q == max_seqlen_k
    rows = zip(*parts, strict=True)
    out = [_plain(*(part[None] for part in row), causal=causal, softmax_scale=softmax_scale)[0] for row in rows]
    _calls.append("rows")
    return torch.cat(out)


@contextlib.contextmanager
def _kernels():
    """Let transformers find kernels."""
    there = (_plain, _rows, None, kernels._pad_input, kernels._unpad_input)
    with (
        mock.patch.object(kernels, "_loaded_implementation", None),
        mock.patch.object(kernels, "_lazy_imports", return_value=there),
        mock.patch.object(around, "get_target_dtype", return_value=None),  # which halves the precision
        mock.patch.object(PreTrainedModel, "_flash_attn_can_dispatch", return_value=True),
        mock.patch.object(_attention, "_installed", return_value=["flash_attention_2"]),
        mock.patch("shardcore.compile.compiler.device_type_here", return_value="cuda"),
    ):
        yield


def _batches(model):
    ids = torch.randint(3, 30, (1, 12), generator=torch.Generator().manual_seed(1))
    yield "whole", batch(model, pads=(0, 0, 0))
    yield "padded", batch(model)
    positions = torch.cat([torch.arange(size) for size in (5, 4, 3)])[None]
    yield "packed", {"input_ids": ids, "labels": ids, "position_ids": positions}


def flash(fields):
    reference = build(dtype=torch.float32, attn_implementation="eager")
    sharded = copy.deepcopy(reference)
    with _kernels():
        shard(sharded, tp=dist.get_world_size(), enable_flash_attention=True, **fields)
        assert sharded.config._attn_implementation == "flash_attention_2"
        for name, given in _batches(reference):
            for model in (reference, sharded):
                model.zero_grad()
            _calls.clear()
            expected, found = (model(**given, use_cache=False).loss for model in (reference, sharded))
            assert ("rows" in _calls) == (name != "whole") == (_calls != ["whole"] * 2), (name, _calls)
            assert_close(expected, found, name, 1e-6)
            expected.backward()
            found.backward()
            assert_same_gradients(reference, sharded, 1e-5)


@pytest.mark.parametrize("fields", [{}, {"enable_sequence_parallelism": True}], ids=["", "sequence"])
def test_rows_padding_and_packed_rows(pool, fields):
    pool.run(flash, fields, world=2)


def efficient():
    reference = build(dtype=torch.float32, attn_implementation="eager")
    sharded = copy.deepcopy(reference)
    with (
        mock.patch.object(_attention, "sdpa_kernel", side_effect=lambda _: contextlib.nullcontext()) as chosen,
        mock.patch("shardcore.compile.compiler.device_type_here", return_value="cuda"),
    ):
        shard(sharded, tp=dist.get_world_size(), enable_flash_attention="xformers")
        for _, given in _batches(reference):
            for model in (reference, sharded):
                model.zero_grad()
                model(**given, use_cache=False).loss.backward()
            assert_same_gradients(reference, sharded, 1e-5)
    assert chosen.call_args == mock.call(SDPBackend.EFFICIENT_ATTENTION)


def test_the_memory_efficient_kernel_of_torch(pool):
    pool.run(efficient, world=2)
