"""A Llama whose tokens are split over the ranks outside regions equals the unsharded one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from llama_cases import batch, build, checkpointing, compare_forward, loss_of, shard, train_beside

from shardcore.testing.parity import assert_close, assert_same_gradients


def _pair(name="LlamaForCausalLM", *, deferred=False, **options):
    reference = build(name, **options)
    mode = {"partial_gradients": "deferred"} if deferred else {}
    sharded = shard(copy.deepcopy(reference), tp=dist.get_world_size(), enable_sequence_parallelism=True, **mode)
    return reference, sharded


def _lengths(name, lengths, kind=None, **options):
    reference, sharded = _pair(name, **options)
    if kind is not None:
        for model in (reference, sharded):
            checkpointing(model.train(), kind)
    for seed, length in enumerate(lengths):
        compare_forward(reference, sharded, batch(reference, seed, length=length, pads=(0, min(1, length - 1))))
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_any_length(pool, tp):
    options = {"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 48} if tp == 3 else {}
    pool.run(_lengths, "LlamaForCausalLM", (8, 13, 7, 5, 4, 3), world=tp, **options)
    pool.run(_lengths, "LlamaModel", (2, 1, 5), world=tp, **options)


@pytest.mark.parametrize(
    "kind", [{"use_reentrant": False}, {"use_reentrant": True}], ids=["non-reentrant", "reentrant"]
)
def test_checkpointing(pool, kind):
    pool.run(_lengths, "LlamaForCausalLM", (13, 8), kind, world=2)


def _two_alive(kind):
    reference, sharded = _pair()
    for model in (reference, sharded):
        checkpointing(model.train(), kind)
        losses = [loss_of(model(**batch(reference, length, length=length, pads=(0,)))) for length in (13, 14)]
        sum(losses).backward()
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize(
    "kind", [{"use_reentrant": False}, {"use_reentrant": True}], ids=["non-reentrant", "reentrant"]
)
def test_two_lengths_alive(pool, kind):
    pool.run(_two_alive, kind, world=2)


def _training(deferred):
    reference, sharded = _pair(deferred=deferred)
    train_beside(reference, sharded)


@pytest.mark.parametrize("deferred", [False, True])
def test_training(pool, deferred):
    pool.run(_training, deferred, world=2)


def _captured():
    reference, sharded = _pair(attn_implementation="eager")
    inputs = batch(reference, length=7, pads=(0, 2))
    outs = [model(**inputs, output_hidden_states=True, output_attentions=True) for model in (reference, sharded)]
    for name in ("hidden_states", "attentions"):
        wanted, got = (out[name] for out in outs)
        assert len(wanted) == len(got)
        for a, b in zip(wanted, got, strict=True):
            assert_close(a, b, name, 1e-9)
    for out in outs:
        sum((t * torch.arange(t.numel()).view_as(t).cos()).sum() for t in out.hidden_states).backward()
    assert_same_gradients(reference, sharded)


def test_captured_outputs(pool):
    pool.run(_captured, world=2)
