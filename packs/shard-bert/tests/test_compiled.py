"""``enable_jit_fused``: blocks compiled while training compute the same, and draw the same numbers on all ranks."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch._inductor.config
from bert_cases import build, compare, inputs, policy, shard
from test_dropout import directional
from torch._dynamo.utils import counters

import shardcore
from shardcore._torch import CAN_TRACE
from shardcore.nn.blocks import CompiledBlock
from shardcore_testing.parity import assert_same_gradients
from shardcore_testing.subject import checkpointing

pytestmark = [
    pytest.mark.newest,  # it is about torch
    pytest.mark.nightly,
    # Dynamo makes an internal error of a warning that is an error, and torch warns of its own doings while it traces.
    pytest.mark.filterwarnings("default"),
]

# With AVX-512 the compiler of torch 2.13 computes a whole BertLayer wrongly in float64, of an unsharded model too.
right = torch._inductor.config.patch("cpp.simdlen", 256)

FUSED = {"tp": 2, "enable_jit_fused": True}
SEQUENCE = {**FUSED, "enable_sequence_parallelism": True}


def test_training_beside_the_unsharded_model(pool):
    pool.run(_training, world=2, timeout=250)


@right
def _training() -> None:
    torch._dynamo.reset()
    counters.clear()
    reference = build("BertForMaskedLM").train()
    sharded = shard(copy.deepcopy(reference), **FUSED)
    compare(reference, sharded)
    assert_same_gradients(reference, sharded)
    assert counters["stats"]["unique_graphs"]
    assert not counters["graph_break"] or not CAN_TRACE
    graphs = counters["stats"]["unique_graphs"]
    # Nothing is compiled in evaluation, and copies are compiled as the original is.
    with torch.no_grad():
        compare_outputs(reference, sharded)
    for model in (reference.eval(), sharded.eval()):
        model.zero_grad()
    compare(reference, sharded, seeds=(2,))
    assert_same_gradients(reference, sharded)
    assert counters["stats"]["unique_graphs"] == graphs


def compare_outputs(reference: Any, sharded: Any) -> None:
    """Compare the logits."""
    batch = inputs(reference, 5)
    torch.testing.assert_close(sharded(**batch).logits, reference(**batch).logits, rtol=0, atol=1e-9)


def test_gradient_checkpointing(pool):
    pool.run(_checkpointing, world=2, timeout=250)


@right
def _checkpointing() -> None:
    torch._dynamo.reset()
    reference = build("BertForMaskedLM").train()
    sharded = shard(copy.deepcopy(reference), **FUSED)
    checkpointing(sharded, {"use_reentrant": False})
    compare(reference, sharded)
    assert_same_gradients(reference, sharded)


@pytest.mark.parametrize("fields", [FUSED, SEQUENCE], ids=["plain", "tokens"])
def test_directional_derivative_under_dropout(pool, fields):
    pool.run(_directional, fields, world=2, timeout=250)


@right
def _directional(fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    counters.clear()
    directional("BertForMaskedLM", None, fields)
    assert counters["stats"]["unique_graphs"]


def test_blocks_can_be_copied_and_pickled(pool):
    pool.run(_copied, world=1, timeout=250)


@right
def _copied() -> None:
    reference = build("BertForMaskedLM").train()
    sharded = shardcore.shard(copy.deepcopy(reference), policy=policy(reference), tp=1, enable_jit_fused=True)
    assert isinstance(sharded.bert.encoder.layer[0], CompiledBlock)
    twin = copy.deepcopy(sharded)
    compare(reference, twin)
    assert_same_gradients(reference, twin)
    assert all(p.grad is None for p in sharded.parameters())
    block = pickle.loads(pickle.dumps(sharded.bert.encoder.layer[0]))
    assert isinstance(block, CompiledBlock)
