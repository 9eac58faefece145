"""The optimizers people use, on a sharded Llama."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from llama_cases import adamw, batch, build, pair, shard, train_beside
from torch import nn
from torch.optim import SGD, Optimizer

import shardcore
from shardcore_testing.parity import assert_same_parameters

pytestmark = [pytest.mark.newest, pytest.mark.nightly]


def _sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def _grouped(model: nn.Module) -> Optimizer:
    decayed = [p for name, p in model.named_parameters() if name.endswith("proj.weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("proj.weight")]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": others, "lr": 3e-3}], lr=1e-2)


OPTIMIZERS = {
    "adamw": adamw,
    "adamw-foreach": functools.partial(adamw, foreach=True),
    "adamw-fused": functools.partial(adamw, fused=True),
    "adamw-groups": _grouped,
    "sgd-momentum": _sgd,
    "sgd-fused": lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, fused=True),
    "adagrad-fused": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, fused=True),
}


def test_optimizers(pool):
    pool.run(_optimizers, world=2)


def _optimizers() -> None:
    for name, optimizer in OPTIMIZERS.items():
        try:
            train_beside(*pair(num_key_value_heads=1, tie_word_embeddings=True), optimizer=optimizer)
        except AssertionError as error:
            error.add_note(name)
            raise


def test_an_optimizer_made_before_sharding(pool):
    pool.run(_before, world=2)


def _before() -> None:
    reference = build()
    model = copy.deepcopy(reference)
    given, wanted = adamw(model), adamw(reference)
    shard(model, tp=2, optimizer=given)
    for m, optimizer in ((model, given), (reference, wanted)):
        m(**batch(m)).loss.backward()
        optimizer.step()
    assert_same_parameters(reference, model)
    stale = build()
    forgotten = adamw(stale)
    with pytest.warns(shardcore.StaleOptimizerWarning, match="AdamW was made before shard"):
        shard(stale)
    assert forgotten.param_groups
