"""Dropout: gradients are those of the masks that were drawn, and ranks agree however they are seeded (H6, H40)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from bert_cases import CROSS, build, inputs, shard
from torch import Tensor
from torch.distributed.tensor import distribute_tensor

import shardcore
from shardcore_testing.parity import equal_on_ranks
from shardcore_testing.subject import checkpointing

CASES = {
    "BertForMaskedLM": {"attn_implementation": "eager"},
    "BertForSequenceClassification": {"attn_implementation": "sdpa"},
    "BertLMHeadModel": CROSS,
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", CASES)
def test_directional_derivative(pool, name, kind):
    pool.run(directional, name, kind, {"tp": 2}, world=2)


def directional(name: str, kind: bool | None, fields: dict[str, Any]) -> None:
    torch.manual_seed(dist.get_rank())
    model = build(name, dropout=0.2, **CASES[name]).train()
    generator = torch.Generator().manual_seed(3)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) for p in model.parameters()]
    if kind is not None:
        checkpointing(model, {"use_reentrant": kind})
    shard(model, **fields)
    # No padding: its row of the embedding has no gradient, though the outputs depend on it.
    batch = {key: t for key, t in inputs(model, 0).items() if "mask" not in key and "label" not in key}
    batch["input_ids"] = batch["input_ids"].clamp(min=1)
    state = shardcore.get_rng_state(model)

    def value() -> Tensor:
        shardcore.set_rng_state(model, state)
        return model(**batch).logits.square().mean()

    pairs = list(zip(model.parameters(), directions, strict=True))
    moves = [distribute_tensor(v, p.device_mesh, p.placements) for p, v in pairs]
    value().backward()
    slope = sum((p.grad.full_tensor() * v).sum() for p, v in pairs if p.grad is not None).item()
    if kind is not None:
        checkpointing(model, None)  # it warns of inputs without gradients
    step, values = 1e-6, []
    for distance in (step, -2 * step):
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move, alpha=distance)
        values.append(value().item())  # with gradients: without them nothing is compiled
    measured = (values[0] - values[1]) / (2 * step)
    assert abs(slope - measured) <= 1e-6 * abs(slope), (slope, measured)


def test_ranks_agree_however_they_are_seeded(pool):
    pool.run(_seeds, world=2)


def _seeds() -> None:
    torch.manual_seed(100 + dist.get_rank())
    model = shard(build("BertForMaskedLM", dropout=0.3).train())
    batch = {key: t for key, t in inputs(model, 0).items() if key != "labels"}
    # The model around the blocks by itself, and the blocks alone: dropouts stand before them.
    for call in (lambda: model(**batch).logits, lambda: model.bert(**batch).last_hidden_state):
        first, second = call(), call()
        assert equal_on_ranks(first)
        assert not torch.equal(first, second)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(5):
        model(**inputs(model, seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    replicated = [p for p in model.parameters() if p.placements[0].is_replicate()]
    assert len(replicated) > 10
    assert all(equal_on_ranks(p.to_local()) for p in replicated)


def test_the_classifiers_dropout(pool):
    pool.run(_classifier, world=2)


def _classifier() -> None:
    # No dropout lies in a region: an unsharded model on the same stream draws the same masks.
    config: dict[str, Any] = {"classifier_dropout": 0.5}
    reference = build("BertForTokenClassification", num_labels=3, **config).train()
    model = shard(copy.deepcopy(reference))
    batch = inputs(reference, 0)
    shardcore.manual_seed(model, 5)
    state = shardcore.get_rng_state(model)["cpu"]
    got = model(**batch).logits
    with torch.random.fork_rng():
        torch.set_rng_state(state)
        wanted = reference(**batch).logits
    torch.testing.assert_close(wanted, got, rtol=0, atol=1e-12)
    assert isinstance(model, transformers.BertForTokenClassification)
