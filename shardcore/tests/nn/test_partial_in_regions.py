"""Norms of queries and keys whose gradients are summed by their region, in one collective."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import TinyPolicy, batch, build, shard, twins

from shardcore import reduce_partial_gradients
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.nn import Replicated
from shardcore.planner.communication import collectives
from shardcore.styles import attribute, local_groups, norm, region
from shardcore.testing.observing import Collectives
from shardcore.testing.parity import assert_close, assert_same_gradients

LAYERS = 2


class Together(TinyPolicy):
    def module_policy(self):
        attention = region(
            enter="attention",
            col="attention.q_proj",
            kv=("attention.k_proj", "attention.v_proj"),
            row="attention.o_proj",
            partial=("attention.q_norm", "attention.k_norm"),
            unit="head",
        )
        mlp = region(enter="mlp", col=("mlp.gate", "mlp.up"), row="mlp.down")
        groups = attribute("attention.num_key_value_groups", local_groups)
        return {**super().module_policy(), "Block": [norm("norm1", "norm2"), attention, mlp, groups]}


def _backward(model, seed=0):
    ids = batch(seed)
    loss = model(ids, labels=ids.roll(1, 1))
    loss.backward()
    return loss


def trains(mode):
    for kv_heads in (1, 8):
        for kind in (None, "reentrant", "non-reentrant"):
            reference, sharded = twins(Together, kv_heads=kv_heads, checkpoint=kind, fields={"partial_gradients": mode})
            for seed in (0, 1):
                assert_close(_backward(reference, seed), _backward(sharded, seed), "loss")
            if mode == "deferred":
                reduce_partial_gradients(sharded)
            assert_same_gradients(reference, sharded)
            assert all(layer.attention.q_norm._shard_reading is None for layer in sharded.model.layers)


@pytest.mark.parametrize("mode", ["in_backward", "deferred"])
def test_gradients(pool, mode):
    pool.run(trains, mode, world=2)


def counts():
    found = []
    for policy in (TinyPolicy, Together):
        sharded = shard(build(kv_heads=8), policy)
        loss = sharded(batch(), labels=batch())
        with Collectives() as sent:
            loss.backward()
        plan = compile_plan(policy, build(kv_heads=8), ShardConfig(tensor_parallel_size=2))
        said = [c for c in collectives(plan) if c.phase == "backward" and c.operation == "all_reduce"]
        found.append((sent.counts["allreduce"], len(said)))
    return found


def test_one_collective_for_both_norms(pool):
    (apart, said_apart), (together, said_together) = pool.run(counts, world=2)[0]
    assert apart - together == said_apart - said_together == LAYERS


def bypassed():
    """A norm that is called outside of its region, or after an exception inside of it, reads for itself."""
    reference, sharded = twins(Together, kv_heads=8)
    q_norm = sharded.model.layers[0].attention.q_norm
    assert isinstance(q_norm, Replicated)
    handle = sharded.model.layers[0].attention.o_proj.register_forward_pre_hook(_interrupt)
    with pytest.raises(RuntimeError, match="interrupted"):
        _backward(sharded)
    handle.remove()
    with torch.no_grad():
        for model in (reference, sharded):
            model.model.layers[0].attention.q_norm.weight.mul_(2)
    x = torch.randn(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_close(reference.model.layers[0].attention.q_norm(x), q_norm(x), "the norm itself")
    clone = copy.deepcopy(sharded)
    for model in (reference, sharded, clone):
        _backward(model)
    assert_same_gradients(reference, sharded)
    assert_same_gradients(reference, clone)


def _interrupt(*_):
    raise RuntimeError("interrupted")


def test_nothing_read_outlives_its_call(pool):
    pool.run(bypassed, world=2)
