"""The decoder of masked words is one parameter with the embedding, and its bias one with the head's (H10, H15)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from bert_cases import DECODER, compare, pair, shard
from torch.distributed.tensor import Replicate, Shard

from shard_bert.cases import build
from shardcore_testing.parity import assert_same_gradients, assert_same_parameters, whole
from shardcore_testing.subject import adamw

HEADS = {"BertForMaskedLM": {}, "BertForPreTraining": {}, "BertLMHeadModel": DECODER}


def _tied(model: Any) -> tuple[bool, bool]:
    words, head = model.bert.embeddings.word_embeddings, model.cls.predictions
    return head.decoder.weight is words.weight, head.decoder.bias is head.bias


@pytest.mark.parametrize(
    ("name", "vocabulary"),
    [("BertForMaskedLM", 101), ("BertForMaskedLM", 5), ("BertForPreTraining", 97), ("BertLMHeadModel", 101)],
)
def test_ties_survive(pool, name, vocabulary):
    pool.run(_survive, name, vocabulary, world=4)


def _survive(name: str, vocabulary: int) -> None:
    reference, model = pair(name, vocab_size=vocabulary, **HEADS[name])
    assert _tied(reference) == _tied(model) == (True, True)
    head = model.cls.predictions
    # 5 rows would leave the last of 4 ranks none.
    assert (
        head.bias.placements == head.decoder.weight.placements == ((Replicate(),) if vocabulary == 5 else (Shard(0),))
    )
    assert tuple(head.bias.shape) == (vocabulary,)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert len(list(model.parameters())) == len(list(reference.parameters()))
    optimizers = [adamw(m) for m in (reference, model)]
    for step in range(2):
        compare(reference, model, seeds=(2 * step, 2 * step + 1))
        assert_same_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(reference, model)
    assert _tied(model) == _tied(copy.deepcopy(model)) == (True, True)


def test_untied(pool):
    pool.run(_untied, world=2)


def _untied() -> None:
    reference, model = pair("BertForMaskedLM", tie_word_embeddings=False)
    assert _tied(model) == _tied(reference)
    assert not _tied(model)[0]
    compare(reference, model)
    assert_same_gradients(reference, model)


def test_saved_once_and_loaded_by_transformers(pool, tmp_path):
    pool.run(_save, str(tmp_path), world=2)
    reference = build("BertForMaskedLM", vocab_size=97).float()
    loaded, info = transformers.BertForMaskedLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert _tied(loaded) == (True, True)
    assert_same_parameters(reference, loaded, 0.0)


def _save(folder: str) -> None:
    model = shard(build("BertForMaskedLM", vocab_size=97).float())
    model.save_pretrained(folder)


def test_the_bias_is_the_one_that_is_used(pool):
    pool.run(_bias, world=2)


def _bias() -> None:
    reference, model = pair("BertForMaskedLM")
    with torch.no_grad():
        for m in (reference, model):
            m.cls.predictions.bias.mul_(2)
    assert whole(model.cls.predictions.decoder.bias).equal(reference.cls.predictions.bias)
    compare(reference, model)
    assert dist.get_world_size() == 2
