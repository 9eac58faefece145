"""Captured outputs, tuples, and losses that are computed after the forward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from bert_cases import CROSS, compare, pair, shard
from torch import Tensor

from shard_bert.cases import build, inputs
from shardcore_testing.parity import assert_close, assert_same_gradients

CAPTURE = {"output_attentions": True, "output_hidden_states": True}
CASES = {
    "BertModel": {"attn_implementation": "eager"},
    "BertForPreTraining": {"attn_implementation": "eager"},
    "BertLMHeadModel": CROSS,
}


def _flat(values: Any) -> list[Tensor]:
    return [t for value in values for t in (_flat(value) if isinstance(value, tuple) else [value])]


def _weighted(tensors: list[Tensor]) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return sum((t * torch.randn(t.shape, generator=generator, dtype=t.dtype)).sum() for t in tensors)


@pytest.mark.nightly
@pytest.mark.parametrize("captured_before", [False, True], ids=["fresh", "captured-before"])
@pytest.mark.parametrize("name", CASES)
def test_captured_outputs_are_whole_and_differentiable(pool, name, captured_before):
    pool.run(_captured, name, captured_before, world=2)


def _captured(name: str, captured_before: bool) -> None:
    reference = build(name, **CASES[name])
    model = copy.deepcopy(reference)
    batch = inputs(reference, 0)
    if captured_before:  # transformers 5 installs its capturing hooks at the first use
        model(**batch, **CAPTURE)
    shard(model)
    wanted, got = (m(**batch, **CAPTURE) for m in (reference, model))
    kinds = ["attentions", "hidden_states"] + ["cross_attentions"] * (name == "BertLMHeadModel")
    for kind in kinds:
        assert len(wanted[kind]) == len(got[kind]) == 2 + (kind == "hidden_states")
        for i, (mine, theirs) in enumerate(zip(wanted[kind], got[kind], strict=True)):
            assert_close(mine, theirs, f"{kind}[{i}]")
    for out in (wanted, got):
        _weighted(_flat(out[kind] for kind in kinds)).backward()
    assert_same_gradients(reference, model)
    wanted, got = (m(**batch, **CAPTURE, return_dict=False) for m in (reference, model))
    assert isinstance(got, tuple)
    assert len(wanted) == len(got)
    for mine, theirs in zip(_flat(wanted), _flat(got), strict=True):
        assert_close(mine, theirs, "tuple")
    assert model(**batch, output_attentions=True).hidden_states is None
    assert model(**batch).attentions is None


@pytest.mark.parametrize("name", ["BertForMaskedLM", "BertForPreTraining"])
def test_losses_after_the_forward(pool, name):
    pool.run(_losses, name, world=2)


def _losses(name: str) -> None:
    reference, model = pair(name)
    for seed in (0, 1):
        batch = inputs(reference, seed)
        wanted, got = (m(**batch, return_dict=False) for m in (reference, model))
        assert isinstance(got, tuple)
        assert len(wanted) == len(got)
        for mine, theirs in zip(wanted, got, strict=True):
            assert_close(mine, theirs, "tuple")
        for out in (wanted, got):
            out[0].backward()
    assert_same_gradients(reference, model)
    # Without labels, with None, and with nothing to learn (0/0).
    labels = {key: batch.pop(key) for key in ("labels", "next_sentence_label") if key in batch}
    assert model(**batch).loss is None
    assert model(**batch, labels=None, return_dict=None).loss is None
    ignored = {**labels, "labels": torch.full_like(labels["labels"], -100)}
    assert torch.isnan(reference(**batch, **ignored).loss)
    assert torch.isnan(model(**batch, **ignored).loss)
    model.config.return_dict = reference.config.return_dict = False
    assert [type(part) for part in model(**batch, **labels)] == [type(part) for part in reference(**batch, **labels)]


def test_one_label_of_two(pool):
    pool.run(_one_label, world=2)


def _one_label() -> None:
    reference, model = pair("BertForPreTraining")
    for missing in ("labels", "next_sentence_label"):
        batch = inputs(reference, 0)
        del batch[missing]
        wanted, got = reference(**batch), model(**batch)
        assert wanted.loss is got.loss is None
        assert list(wanted) == list(got)
        assert_close(wanted.prediction_logits, got.prediction_logits, "prediction_logits")


def test_return_dict_is_none(pool):
    pool.run(_none, world=2)


def _none() -> None:
    reference, model = pair("BertModel")
    batch = inputs(reference, 0)
    assert type(model(**batch, return_dict=None)) is type(reference(**batch, return_dict=None))


def test_bfloat16(pool):
    pool.run(_bfloat16, world=2)


def _bfloat16() -> None:
    for name in ("BertForMaskedLM", "BertForSequenceClassification"):
        reference = build(name).to(torch.bfloat16)
        model = shard(copy.deepcopy(reference))
        compare(reference, model, tolerance=0.03)
        assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
        assert_same_gradients(reference, model, 0.05)
