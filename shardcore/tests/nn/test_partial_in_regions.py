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
from shardcore.policy import Policy
from shardcore.styles import attribute, local_groups, norm, region, replicate
from shardcore_planner.communication import collectives
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients

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


class Latent(torch.nn.Module):
    """Columns that read what norms make of latent states; the region is entered behind ``first``, a linear."""

    def __init__(self, *, is_normed=True):
        super().__init__()
        self.first = torch.nn.Linear(8, 12)
        self.norm = torch.nn.LayerNorm(12) if is_normed else torch.nn.Identity()
        self.other = torch.nn.LayerNorm(12)
        self.heads = torch.nn.Linear(12, 16)
        self.last = torch.nn.Linear(16, 8)

    def forward(self, x):
        latent = self.first(x)
        return self.last(self.heads(self.norm(latent)) * self.heads(self.other(latent)))


class LatentPolicy(Policy):
    def module_policy(self):
        inner = region(enter="first", col="heads", row="last", partial=("norm", "other"))
        return {"Latent": [inner, replicate("first")]}


def latent(is_normed):
    torch.manual_seed(1)
    reference = Latent(is_normed=is_normed).double()
    sharded = shard(copy.deepcopy(reference), LatentPolicy)
    x = torch.randn(3, 8, dtype=torch.float64)
    reference(x).square().sum().backward()
    with Collectives() as sent:
        sharded(x).square().sum().backward()
    assert_same_gradients(reference, sharded)
    return sent.counts["allreduce"]


@pytest.mark.parametrize("is_normed", [True, False], ids=["norm", "identity"])
def test_where_a_region_is_entered_inside_of_its_module(pool, is_normed):
    # The row linear's, the entry's, and one for what the norms have.
    assert pool.run(latent, is_normed, world=2) == [3, 3]
    model = Latent(is_normed=is_normed)
    plan = compile_plan(LatentPolicy, model, ShardConfig(tensor_parallel_size=2))
    assert len([c for c in collectives(plan) if c.operation == "all_reduce"]) == 3


def absent():
    """Return what is sent, and what the plan says, with the norms and without them."""
    found = []
    for qk_norm in (True, False):
        reference, sharded = twins(Together, kv_heads=8, qk_norm=qk_norm)
        _backward(reference)
        with Collectives() as sent:
            _backward(sharded)
        assert_same_gradients(reference, sharded)
        plan = compile_plan(Together, build(kv_heads=8, qk_norm=qk_norm), ShardConfig(tensor_parallel_size=2))
        said = [c for c in collectives(plan) if c.operation == "all_reduce"]
        found.append((sent.counts["allreduce"], len(said)))
    return found


def test_nothing_is_sent_for_norms_that_a_model_leaves_out(pool):
    (sent, said), (sent_without, said_without) = pool.run(absent, world=2)[0]
    assert sent - sent_without == said - said_without == LAYERS
