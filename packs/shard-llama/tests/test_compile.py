"""A sharded Llama under torch.compile: no graph break of ours, and the numbers of eager mode."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from llama_cases import batch, build, compare_forward, shard
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from transformers.modeling_layers import GradientCheckpointingLayer

from shardcore._torch import CAN_TRACE
from shardcore_testing.parity import assert_same_gradients, whole
from shardcore_testing.subject import checkpointing

# Dynamo makes an internal error of a warning that is an error, and torch warns of its own doings while it traces.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.newest, pytest.mark.nightly]

needs_whole_graphs = pytest.mark.skipif(
    not CAN_TRACE, reason="before torch 2.13 graphs break where parameters are read"
)

BACKEND = "aot_eager"  # traces forward and backward as inductor does, without generating code


# Older releases of transformers recompute the call of a block, newer ones (5.23 is one) its forward alone.
RECOMPUTES_CALLS = "__call__" in vars(GradientCheckpointingLayer)
PLAIN = {"tp": 2}
SEQUENCE = {"tp": 2, "enable_sequence_parallelism": True}


@needs_whole_graphs
@pytest.mark.parametrize("way", ["plain", "one-kv-head", "checkpointing"])
@pytest.mark.parametrize("fields", [PLAIN, SEQUENCE], ids=["whole", "split"])
def test_every_layer_is_one_graph(pool, way, fields):
    pool.run(_layers, way, fields, world=2, timeout=100)


def _layers(way: str, fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    # Not sdpa in a compiled checkpoint: with any DTensor that `to_local` reads there, torch 2.13 takes the mesh for a
    # tensor to be saved ("expected all tensors_saved_with_vc_check to be Tensors"), without shardcore too.
    attention = "eager" if way == "checkpointing" else "sdpa"
    reference = build(num_key_value_heads=1 if way == "one-kv-head" else 4, attn_implementation=attention)
    model = copy.deepcopy(reference)
    if way == "checkpointing":
        checkpointing(model, {"use_reentrant": False})
    shard(model, **fields)
    for layer in model.model.layers:
        layer.compile(backend=BACKEND, fullgraph=True)
    counters.clear()
    for seed in (0, 1):
        compare_forward(reference, model, batch(model, seed, length=7))
    assert_same_gradients(reference, model)
    assert not counters["graph_break"]
    # One graph serves both layers and both batches. Where the call of a block is recomputed, the number of tokens has
    # to be set anew, which is another.
    again = RECOMPUTES_CALLS and way == "checkpointing" and fields != PLAIN
    assert counters["stats"]["unique_graphs"] <= (2 if again else 1)


@pytest.mark.islands
@pytest.mark.parametrize("fields", [{"tp": 2}, {**SEQUENCE, "parallel_output": True}], ids=["whole", "split"])
def test_the_whole_model(pool, fields):
    pool.run(_whole, fields, world=2, timeout=100)


def _whole(fields: dict[str, Any]) -> None:
    torch._dynamo.reset()
    breaks = []
    for sharded in (False, True):
        torch._dynamo.reset()
        counters.clear()
        reference = build(num_key_value_heads=2, vocab_size=97, tie_word_embeddings=True)
        model = copy.deepcopy(reference)
        if sharded:
            shard(model, **fields)
        compiled = torch.compile(model, backend=BACKEND)
        for seed in (0, 1):
            inputs = batch(reference, seed)
            reference(**inputs).loss.backward()
            out = compiled(**inputs)
            out.loss.backward()
            torch.testing.assert_close(whole(out.logits), reference(**inputs).logits, rtol=0, atol=1e-9)
        # Where logits are split, sums are in float64, and in the unsharded model in float32.
        assert_same_gradients(reference, model, 1e-5 if "parallel_output" in fields else 1e-9)
        breaks.append(dict(counters["graph_break"]))
    assert breaks[0] == breaks[1] or not CAN_TRACE, breaks  # whatever breaks is transformers'


@pytest.mark.islands
@needs_whole_graphs
def test_explained(pool):
    pool.run(_explained, world=2, timeout=100)


def _explained() -> None:
    torch._dynamo.reset()
    model = shard(build())
    ids = batch(model)["input_ids"]
    assert torch._dynamo.explain(model)(input_ids=ids).graph_break_count == 0
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter)
    with torch.no_grad():
        for _ in range(3):
            compiled(input_ids=ids)
    assert counter.frame_count == 1


def test_live_dropouts_break_the_graph_and_stay_right(pool):
    pool.run(_dropout, world=2, timeout=100)


def _dropout() -> None:
    # Same stream, same masks: the compiled model repeats the eager one.
    torch._dynamo.reset()
    eager = build(attention_dropout=0.3, attn_implementation="eager")
    compiled = copy.deepcopy(eager)
    import shardcore

    for model in (eager, compiled):
        shard(model)
        shardcore.manual_seed(model, 4)
    for layer in compiled.model.layers:
        layer.compile(backend=BACKEND)
    counters.clear()
    for seed in (0, 1):
        for model in (eager, compiled):
            model(**batch(model, seed)).loss.backward()
    assert counters["graph_break"]
    for mine, theirs in zip(eager.parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=1e-9, atol=1e-9)
    # Turned off, the same layers compile whole.
    torch._dynamo.reset()
    counters.clear()
    compiled.eval()
    eager.eval()
    inputs = batch(eager, 5)
    torch.testing.assert_close(compiled(**inputs).logits, eager(**inputs).logits, rtol=0, atol=1e-9)
    assert not counters["graph_break"] or not CAN_TRACE
