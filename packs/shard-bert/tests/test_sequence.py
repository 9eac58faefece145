"""BERT with its tokens split over the ranks, in the ways that the conformance kit leaves out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from bert_cases import CROSS, build, compare, shard

import shardcore
from shardcore.testing.parity import assert_same_gradients

WAYS: dict[str, dict[str, Any]] = {
    "gathered again": {"sequence_keep_gathered": False},
    "deferred": {"partial_gradients": "deferred"},
    "both": {"sequence_keep_gathered": False, "partial_gradients": "deferred"},
}


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
