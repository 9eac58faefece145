"""Channels: what is sent, on any axis, and in any form."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from own_channel import HalfChannel
from tiny import batch, build, shard, twins

from shardcore.comm import Channel
from shardcore.comm.dtensor_params import all_reduce_bucket
from shardcore.mesh import ShardContext, Sizes, build_mesh, context_of
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, equal_on_ranks

UPSTREAM = "ignore:.*Function.* should not be instantiated:DeprecationWarning"  # torch._dynamo does it


def _own(rank):
    return torch.arange(6.0).reshape(2, 3) + 10 * rank


def primitives(kind):
    channel = kind(dist.group.WORLD)
    rank, world = dist.get_rank(), dist.get_world_size()
    assert (channel.rank, channel.size) == (rank, world)
    everybody = torch.stack([_own(r) for r in range(world)])
    assert torch.equal(channel.all_gather(_own(rank)), everybody)
    assert torch.equal(channel.start_all_gather(_own(rank).t().contiguous().t()).wait(), everybody)
    x = _own(rank)
    assert channel.all_reduce(x).data_ptr() == x.data_ptr(), "sums are in place"
    assert torch.equal(x, everybody.sum(0))
    x = _own(rank)
    assert channel.start_all_reduce(x).wait().data_ptr() == x.data_ptr()
    assert torch.equal(x, everybody.sum(0))
    stacked = torch.stack([_own(rank) + r for r in range(world)])
    assert torch.equal(channel.reduce_scatter(stacked), everybody.sum(0) + world * rank)
    assert torch.equal(channel.start_reduce_scatter(stacked).wait(), everybody.sum(0) + world * rank)
    assert torch.equal(channel.all_reduce_max(_own(rank)), everybody[-1])
    assert copy.deepcopy(channel) is channel


@pytest.mark.parametrize("kind", [Channel, HalfChannel])
@pytest.mark.parametrize("world", [1, 3])
def test_primitives(pool, kind, world):
    pool.run(primitives, kind, world=world)


def other_axis():
    context = ShardContext.of(build_mesh(Sizes(dp_shard=2, tp=2)))
    channel = context.axis("dp_shard").channel
    assert channel.all_gather(torch.tensor([dist.get_rank()])).flatten().tolist() == [channel_rank(0), channel_rank(1)]


def channel_rank(place):
    return 2 * place + dist.get_rank() % 2


def test_a_channel_on_another_axis(pool):
    pool.run(other_axis, world=4)


def _half(model, **fields):
    made = ShardContext.of
    with mock.patch.object(ShardContext, "of", lambda *args, **options: made(*args, **options, transport=HalfChannel)):
        return shard(model, **fields)


def _step(model, ids):
    with Collectives() as sent:
        loss = model(ids, labels=ids)
        loss.backward()
    return loss.detach(), sent


def half_as_many_bytes():
    reference, model = twins()
    half = _half(copy.deepcopy(reference))
    assert type(context_of(half).channel) is HalfChannel
    ids = batch()
    wanted, plain = _step(model, ids)
    loss, sent = _step(half, ids)
    # Activations of 8 bytes become 2, twice: to the ranks of the sums, and back to all. What is exact is as large.
    assert sum(sent.bytes) < sum(plain.bytes) * 0.6
    assert_close(wanted, loss, "loss", 0.02)
    assert not torch.equal(wanted, loss), "nothing was rounded"
    for (name, parameter), other in zip(model.named_parameters(), half.parameters(), strict=True):
        got, want = other.grad.full_tensor(), parameter.grad.full_tensor()
        assert (got - want).norm() < 0.1 * want.norm() + 1e-3, name
        if all(placement.is_replicate() for placement in other.placements):
            assert equal_on_ranks(other.grad), f"{name}: ranks differ"


def test_a_channel_of_ones_own_serves_a_whole_model(pool):
    pool.run(half_as_many_bytes, world=2)


def exact_sums():
    rank, world = dist.get_rank(), dist.get_world_size()
    own = [torch.tensor([1.001 + r, 0.3 * r], dtype=torch.float64) for r in range(world)]
    (total,) = all_reduce_bucket([own[rank].clone()], HalfChannel(dist.group.WORLD))
    assert_close(sum(own), total, "gradients of replicated parameters")


def test_gradients_of_replicated_parameters_are_sent_as_they_are(pool):
    pool.run(exact_sums, world=2)


def compiled_half():
    model = _half(build(checkpoint=None))
    ids = batch()
    loss, _ = _step(model, ids)
    eager = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")(ids, labels=ids)
    compiled.backward()
    assert_close(loss, compiled.detach(), "loss")
    for name, parameter in model.named_parameters():
        assert_close(eager[name], parameter.grad.full_tensor(), name)


@pytest.mark.nightly
@pytest.mark.filterwarnings(UPSTREAM)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
def test_a_channel_of_ones_own_compiles(pool):
    pool.run(compiled_half, world=2)
