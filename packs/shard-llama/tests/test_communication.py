"""How much a sharded Llama communicates, and that checkpointing recomputes what it should."""

from __future__ import annotations

import copy

import pytest
import torch
from llama_cases import batch, build, clip_and_step, compare_forward, is_checkpointing, pair, shard
from torch.optim import SGD

from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_same_gradients
from shardcore_testing.subject import checkpointing

LAYERS = 3
KINDS = {"reentrant": {"use_reentrant": True}, "non-reentrant": {"use_reentrant": False}}


def _step(model, **call) -> tuple[int, int]:
    """Return the number of collectives of a forward and of a backward."""
    with Collectives() as seen:
        loss = model(**batch(model), **call).loss
        forward = seen.take()
        loss.backward()
        return forward, seen.take()


def test_two_collectives_each_way_for_a_layer(pool):
    # H1. Forward: two for a layer, the embedding, the gathered logits. Backward: two for a layer, the head's enter.
    assert set(pool.run(_counts, {}, world=2)) == {(2 * LAYERS + 2, 2 * LAYERS + 1)}


def test_shared_kv_heads_cost_one_more_each_way(pool):
    # The parts of k and v, weights and biases, travel together, and so do their gradients.
    options = {"num_key_value_heads": 1, "num_attention_heads": 4}
    assert set(pool.run(_counts, options, world=2)) == {(3 * LAYERS + 2, 3 * LAYERS + 1)}


def _counts(options: dict) -> tuple[int, int]:
    model = shard(build(num_hidden_layers=LAYERS, **options))
    first = _step(model)
    assert _step(model) == first  # accumulation costs the same again
    with torch.no_grad(), Collectives() as seen:
        model(**batch(model))
        assert seen.take() == first[0]
    return first


@pytest.mark.nightly
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_checkpointing_recomputes_with_equal_gradients(pool, kind, when):
    # H16. A reentrant checkpoint repeats both all-reduces of a layer; the other stops before the last one.
    repeated = {"reentrant": 2, "non-reentrant": 1}[kind]
    expected = (2 * LAYERS + 2, 2 * LAYERS + 1 + repeated * LAYERS)
    assert set(pool.run(_checkpointed, KINDS[kind], when, world=2)) == {expected}


def _checkpointed(kind: dict, when: str) -> tuple[int, int]:
    reference = build(num_hidden_layers=LAYERS)
    model = copy.deepcopy(reference)
    if when == "before":
        checkpointing(model, kind)
    shard(model)
    if when == "after":
        checkpointing(model, kind)
    assert is_checkpointing(model)
    calls = []
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(lambda *_: calls.append(1))
    for seed in (0, 1):
        compare_forward(reference, model, batch(model, seed))
    assert len(calls) == 2 * 2 * LAYERS  # two batches, each computed twice
    assert_same_gradients(reference, model)
    clip_and_step((reference, model), (SGD(reference.parameters(), 0.1), SGD(model.parameters(), 0.1)), 0.05)
    checkpointing(model, None)
    calls.clear()
    compare_forward(reference, model, batch(model, 2))
    assert len(calls) == LAYERS
    assert_same_gradients(reference, model)
    checkpointing(model, kind)
    return _step(model)


def test_checkpointing_with_shared_kv_heads_and_frozen_weights(pool):
    pool.run(_checkpointed_kv, world=4)


def _checkpointed_kv() -> None:
    for kind in KINDS.values():
        reference = build(num_key_value_heads=2, attn_implementation="eager")
        for name, parameter in reference.named_parameters():
            parameter.requires_grad = "q_proj" not in name and "norm" not in name
        model = shard(copy.deepcopy(reference))
        checkpointing(model, kind)
        for seed in (0, 1):
            compare_forward(reference, model, batch(model, seed))
        assert_same_gradients(reference, model)


def test_a_failure_inside_a_layer_leaves_the_model_usable(pool):
    pool.run(_failure, world=2)


def _failure() -> None:
    reference, model = pair(attention_dropout=0.0)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.model.layers[1].mlp.act_fn.register_forward_hook(fail)
    before = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        model(**batch(model))
    assert torch.equal(torch.get_rng_state(), before)
    handle.remove()
    compare_forward(reference, model, batch(model))
    assert_same_gradients(reference, model)
