"""What is particular to ViT of transformers: sizes, precision, captured outputs of one class token and many patches."""

from __future__ import annotations

import copy

import pytest
import torch
from vit_cases import case, one_image_beside, pair, shard, step_beside, train_beside

from shard_vit.cases import images
from shardcore_testing import weighted_mean
from shardcore_testing.parity import assert_close, assert_same_gradients
from shardcore_testing.subject import flat

CASES = ("model", "image_classification", "masked_image_modeling")


def test_three_ranks_and_the_sizes_of_a_real_model(pool):
    pool.run(_three, world=3)


def _three() -> None:
    each = case("image_classification")
    reference, model = pair(each, num_attention_heads=6)
    train_beside(each, reference, model, steps=1)
    # 197 tokens in 3 heads, as vit-tiny has.
    reference, model = pair(each, image_size=224, patch_size=16, hidden_size=192, num_attention_heads=3)
    step_beside(each, reference, model, 0)
    assert_same_gradients(reference, model)


@pytest.mark.parametrize("name", CASES)
def test_one_image(pool, name):
    pool.run(_one_image, name, world=2)


def _one_image(name: str) -> None:
    each = case(name)
    one_image_beside(each, *pair(each))


@pytest.mark.parametrize("world", [2, 3, 4])
def test_197_tokens_over_any_number_of_ranks(pool, world):
    pool.run(_sequence, world=world)


def _sequence() -> None:
    each = case("image_classification")
    reference = each.build(image_size=56, num_attention_heads=12)
    model = shard(copy.deepcopy(reference), enable_sequence_parallelism=True)
    call = {"output_hidden_states": True, "output_attentions": True}
    step_beside(each, reference, model, 0, **call)
    wanted, got = (m(**each.inputs(reference, 1), **call) for m in (reference, model))
    assert wanted.hidden_states[0].shape[1] == 197
    for name in ("hidden_states", "attentions"):
        for mine, theirs in zip(wanted[name], got[name], strict=True):
            assert_close(mine, theirs, name)
    for out in (wanted, got):
        (out.loss + weighted_mean(*out.hidden_states, *out.attentions)).backward()
    assert_same_gradients(reference, model)


def test_larger_images(pool):
    pool.run(_larger, world=2)


def _larger() -> None:
    reference, model = pair(case("model"))
    wanted, got = (m(images(40, 1), interpolate_pos_encoding=True) for m in (reference, model))
    assert wanted.last_hidden_state.shape[1] == 101
    assert_close(wanted.last_hidden_state, got.last_hidden_state, "last_hidden_state")
    for out in (wanted, got):
        weighted_mean(out.last_hidden_state).backward()
    assert_same_gradients(reference, model)


@pytest.mark.parametrize("name", CASES)
def test_bfloat16(pool, name):
    pool.run(_bfloat16, name, world=2)


def _bfloat16(name: str) -> None:
    each = case(name)
    reference = each.build().to(torch.bfloat16)
    model = shard(copy.deepcopy(reference))
    inputs = {k: t.bfloat16() if t.is_floating_point() else t for k, t in each.inputs(reference, 0).items()}
    outs = [m(**inputs) for m in (reference, model)]
    for (label, mine), (_, theirs) in zip(*(flat(out) for out in outs), strict=True):
        assert theirs.dtype == mine.dtype
        assert_close(mine, theirs, label, 0.03)
    for out in outs:
        weighted_mean(*(t.float() for label, t in flat(out) if label != "loss")).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}
    assert_same_gradients(reference, model, 0.05)
