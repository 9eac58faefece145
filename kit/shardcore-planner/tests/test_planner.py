"""What a plan says about bytes and collectives, without a run."""

from __future__ import annotations

import pytest
from tiny import TinyPolicy, build

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore_planner import collectives, parameter_bytes


def _plan(model, **fields):
    return compile_plan(TinyPolicy, model, ShardConfig(**fields))


@pytest.mark.parametrize(("kv_heads", "ranks"), [(1, 2), (2, 4), (1, 4)])
def test_shared_kv_heads_are_cut_as_finely_as_the_rest(kv_heads, ranks):
    model = build(kv_heads=kv_heads, vocab=96)
    plan = _plan(model, tensor_parallel_size=ranks)
    replicated = {p.name for p in plan.parameters if str(p.layout).startswith("replicated")}
    assert not any("k_proj" in name or "v_proj" in name for name in replicated)
    sizes = {name: p.numel() * p.itemsize for name, p in model.named_parameters()}
    held = sum(size if name in replicated else size // ranks for name, size in sizes.items())
    assert parameter_bytes(plan) == [held] * ranks


def _of_keys(plan):
    return [(c.where, c.phase, c.operation) for c in collectives(plan) if "layers.0.attention.k_proj" in c.payload]


def test_collectives_of_shared_kv_heads():
    place = "model.layers.0.attention"
    model = build(kv_heads=2)
    assert _of_keys(_plan(model, tensor_parallel_size=2)) == []
    plan = _plan(model, tensor_parallel_size=4)
    assert _of_keys(plan) == [(place, "forward", "all_gather"), (place, "backward", "reduce_scatter")]
    uneven = build(kv_heads=2, hidden=40)  # heads of 5 rows for 2 ranks
    assert _of_keys(_plan(uneven, tensor_parallel_size=4)) == [(place, "backward", "all_reduce")]
    assert _of_keys(_plan(uneven, tensor_parallel_size=4, partial_gradients="deferred")) == []
    # A forward alone has no optimizer state to save, and sends nothing for them.
    assert _of_keys(_plan(model, tensor_parallel_size=4, inference_only=True)) == []


def _of_logits(**fields):
    found = collectives(_plan(build(), tensor_parallel_size=2, **fields))
    return [(c.where, c.operation) for c in found if c.where in ("", "head") and c.phase == "forward"]


def test_logits_that_stay_split_are_not_gathered():
    assert ("head", "all_gather") in _of_logits()
    split = _of_logits(parallel_output=True)
    assert ("head", "all_gather") not in split
    assert split.count(("", "all_reduce")) == 2
