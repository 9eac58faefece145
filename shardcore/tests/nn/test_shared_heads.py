"""Fewer KV heads than ranks: each rank holds a part of the head that it uses, and neighbours gather it for use."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build, shard, twins
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore.mesh.axes import shared_groups
from shardcore.mesh.context import context_of
from shardcore.nn import ColumnLinear
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters

HEAD_DIM, HIDDEN = 4, 32


def _step(model, seed=0):
    ids = batch(seed)
    loss = model(ids, labels=ids.roll(1, 1))
    loss.backward()
    return loss


def _compare(reference, sharded, seeds=(0, 1)):
    for seed in seeds:
        assert_close(_step(reference, seed), _step(sharded, seed), "loss")
    assert_same_gradients(reference, sharded)
    reference.zero_grad()
    sharded.zero_grad()


def _shared(model):
    return {n: p for n, p in model.named_parameters() if "k_proj" in n or "v_proj" in n}


def trains(kv_heads):
    reference, sharded = twins(kv_heads=kv_heads, qk_norm=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (reference, sharded)]
    for step in range(3):
        for seed in (2 * step, 2 * step + 1):
            assert_close(_step(reference, seed), _step(sharded, seed), "loss")
        assert_same_gradients(reference, sharded)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (reference, sharded)]
        assert_close(norms[0], norms[1].full_tensor(), "gradient norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(reference, sharded)
    head = HEAD_DIM * HIDDEN
    for name, parameter in _shared(sharded).items():
        assert parameter.placements == (Shard(0),), name
        assert parameter.shape == reference.get_parameter(name).shape, name
        state = optimizers[1].state[parameter]
        held = [local_tensor(t) for t in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        most = head if name.endswith("weight") else HEAD_DIM
        assert all(part.numel() == most * kv_heads // dist.get_world_size() for part in held), name


@pytest.mark.parametrize(("world", "kv_heads"), [(2, 1), (4, 1), (4, 2)])
def test_a_rank_holds_less_than_its_head_and_trains_as_the_whole(pool, world, kv_heads):
    """H25, and H8: the gradient norm counts each row once."""
    pool.run(trains, kv_heads, world=world)


def counts():
    found = {}
    for kind in (None, "non-reentrant", "reentrant"):
        sharded = shard(build(kv_heads=2, qk_norm=False, checkpoint=kind), NoNorms)
        ids = batch()
        for _ in range(2):
            with Collectives() as forward:
                loss = sharded(ids, labels=ids)
            with Collectives() as backward:
                loss.backward()
        with torch.no_grad(), Collectives() as without:
            sharded.eval()(ids)
        found[kind] = [dict(c.counts) for c in (forward, backward, without)]
    return found


class NoNorms(TinyPolicy):
    def module_policy(self):
        rows = super().module_policy()
        return {**rows, "Block": [row for row in rows["Block"] if not row.text.startswith("partial")]}


def test_one_gather_and_one_scatter_for_each_block(pool):
    """Weights and biases of keys and values travel together; recomputation gathers once more, and scatters no more."""
    layers, (found, *others) = 2, pool.run(counts, world=4)
    assert all(other == found for other in others)
    gathers = {"allgather_base": layers + 1}  # the head gathers its output
    forward = {**gathers, "allreduce": 2 * layers + 1}
    for kind, repeated in ((None, 0), ("non-reentrant", 1), ("reentrant", 2)):
        backward = {"allreduce": (2 + repeated) * layers + 1, "alltoall_base": layers}
        if kind:
            backward["allgather_base"] = layers
        assert found[kind] == [forward, backward, forward], kind


def one_rank_only(kind, **options):
    """A rank that misses the fast path sends what the others send, in the same order."""
    reference, sharded = twins(kv_heads=2, **options)
    for layer in sharded.model.layers if dist.get_rank() == 1 else ():
        for member in (layer.attention.k_proj, layer.attention.v_proj)[: 2 if kind == "both" else 1]:
            if kind == "forward":
                member.register_forward_hook(lambda *_: None)
            elif kind == "pre":
                member.register_forward_pre_hook(lambda _, args: (args[0] * 1,))
            else:
                member.register_full_backward_hook(lambda *_: None)
    _compare(reference, sharded)
    sent = []
    for checkpoint in (None, "non-reentrant", "reentrant"):
        reference.model.checkpoint = sharded.model.checkpoint = checkpoint
        _compare(reference, sharded)
        with Collectives() as counted:
            _step(sharded)
        sent.append(dict(counted.counts))
        _step(reference)
        assert_same_gradients(reference, sharded)
        reference.zero_grad()
        sharded.zero_grad()
    return sent


@pytest.mark.parametrize("kind", ["forward", "pre", "backward", "both"])
def test_hooks_on_one_rank_only(pool, kind):
    sent = pool.run(one_rank_only, kind, world=4)
    assert all(one == sent[0] for one in sent)


def test_hooks_on_one_rank_only_where_heads_are_held_whole(pool):
    sent = pool.run(one_rank_only, "backward", hidden=40, world=4)
    assert all(one == sent[0] for one in sent)


def uneven():
    for options in ({"hidden": 40, "kv_heads": 2}, {"hidden": 48, "kv_heads": 1}):  # heads of 5 and 6 rows
        reference, sharded = twins(**options)
        assert {p.placements for p in _shared(sharded).values()} == {(Replicate(),)}
        _compare(reference, sharded)


def test_heads_that_do_not_divide_by_their_ranks_are_held_whole(pool):
    pool.run(uneven, world=4)


def data_parallel(how):
    reference = build(kv_heads=1)
    sharded = copy.deepcopy(reference)
    shardcore.shard(sharded, policy=TinyPolicy, tp=2, dp=2, wrap=how == "shardcore")
    mesh = context_of(sharded).mesh["dp_shard"]
    if how == "linears":  # gathered by FSDP2 only when they are called, after the region has opened
        for layer in sharded.model.layers:
            fully_shard(layer.attention.k_proj, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(sharded, mesh=mesh)
    half = mesh.get_local_rank()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (reference, sharded)]
    for _ in range(2):
        for seed in (0, 1):
            ids = batch(seed, rows=4)
            reference(ids, labels=ids.roll(1, 1)).backward()
            own = ids[2 * half : 2 * half + 2]
            sharded(own, labels=own.roll(1, 1)).backward()
        assert_same_gradients(reference, sharded)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(reference, sharded)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # any linear does
@pytest.mark.parametrize("how", ["shardcore", "linears"])
def test_over_two_replicas(pool, how):
    pool.run(data_parallel, how, world=4)


def groups():
    first = shard(build(kv_heads=2))
    known = set(dist.distributed_c10d._world.pg_map)
    pair = context_of(first).among(2)
    assert pair.group in shared_groups()
    assert dist.get_process_group_ranks(pair.group) == [dist.get_rank() // 2 * 2, dist.get_rank() // 2 * 2 + 1]
    again = shard(build(kv_heads=2))
    assert context_of(again).among(2).group is pair.group
    assert set(dist.distributed_c10d._world.pg_map) == known, "the second model makes no group"
    assert copy.deepcopy(first).model.layers[0].attention.k_proj._shard_context.among(2) is pair

    own = dist.new_group(range(4))
    reference, other = twins(kv_heads=2, fields={"tensor_parallel_process_group": own})
    assert context_of(other).among(2).group not in shared_groups(), "a caller's group has neighbours of its own"
    _compare(reference, other)
    one = shard(build(kv_heads=1))
    assert context_of(one).among(4) is context_of(one).channel


def test_groups_are_made_once(pool):
    pool.run(groups, world=4)


def alone():
    """A linear by itself, without a region around it."""
    torch.manual_seed(0)
    native = nn.Linear(6, 8, dtype=torch.float64)
    linear = ColumnLinear.from_native_module(copy.deepcopy(native), dist.group.WORLD, replication=2)
    assert "gathered by 2 ranks" in repr(linear)
    x = torch.randn(3, 6, dtype=torch.float64)
    start = dist.get_rank() // 2 * 4
    entered, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = linear(entered)
    assert_close(native(x)[:, start : start + 4], out, "output")
    # Each half of the outputs is computed by two ranks.
    out.square().sum().backward()
    (2 * native(plain).square().sum()).backward()
    assert_close(plain.grad, entered.grad, "input gradient")
    for name in ("weight", "bias"):
        assert_close(getattr(native, name).grad, getattr(linear, name).grad.full_tensor(), name)


def test_a_linear_alone(pool):
    pool.run(alone, world=4)


def frozen():
    reference, sharded = twins(kv_heads=1)
    for names in (("k_proj",), ("v_proj.weight", "k_proj.bias"), ("k_proj", "v_proj")):
        for model in (reference, sharded):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not any(part in name for part in names))
        _compare(reference, sharded)
        loss = sharded(batch(), labels=batch())
        with Collectives() as counted:
            loss.backward()
        assert counted.counts["alltoall_base"] == (0 if len(names) == 2 and names[1] == "v_proj" else 2)
        sharded.zero_grad()


def test_frozen_members(pool):
    pool.run(frozen, world=2)


class InterruptError(RuntimeError):
    pass


def _interrupt(*_):
    raise InterruptError


def interrupted():
    """What was read for an earlier call is used by no later one, even if an exception left it behind."""
    reference, sharded = twins(kv_heads=1)
    attention = sharded.model.layers[0].attention
    handle = attention.o_proj.register_forward_pre_hook(_interrupt)
    with pytest.raises(InterruptError):
        _step(sharded)
    assert attention.k_proj.reading is not None
    handle.remove()
    clone = copy.deepcopy(sharded)
    with torch.no_grad():
        for model in (reference, sharded):
            model.model.layers[0].attention.k_proj.weight.mul_(2)
    x = torch.randn(3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert_close(reference.model.layers[0].attention.k_proj(x), attention.k_proj(x), "the linear itself")
    _compare(reference, sharded)
    assert attention.k_proj.reading is attention.v_proj.reading is None
    _compare(build(kv_heads=1), clone)


def test_nothing_read_outlives_its_call(pool):
    pool.run(interrupted, world=2)
