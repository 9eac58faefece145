"""Channels: what is sent, on any axis, and in any form."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from needs import TRACES
from tiny import batch, build, shard, twins
from torch import nn

from shardcore.comm.collectives import Channel
from shardcore.comm.dtensor_params import all_reduce_bucket
from shardcore.mesh.axes import Sizes, build_mesh
from shardcore.mesh.context import ShardContext, context_of
from shardcore.nn import ColumnLinear
from shardcore.nn.sequence.shard import SequenceShard
from shardcore.transfer.fp8 import Fp8Channel, pack
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


@pytest.mark.parametrize("world", [1, 3])
def test_primitives(pool, world):
    pool.run(primitives, Channel, world=world)


def other_axis():
    context = ShardContext.of(build_mesh(Sizes(dp_shard=2, tp=2)))
    channel = context.axis("dp_shard")
    assert channel.all_gather(torch.tensor([dist.get_rank()])).flatten().tolist() == [channel_rank(0), channel_rank(1)]


def channel_rank(place):
    return 2 * place + dist.get_rank() % 2


def test_a_channel_on_another_axis(pool):
    pool.run(other_axis, world=4)


def _step(model, ids):
    with Collectives() as sent:
        loss = model(ids, labels=ids)
        loss.backward()
    return loss.detach(), sent


def _rounded(rows, form):
    """What arrives of rows (parts, n) that travel in 8 bits, in float64."""
    scale = rows.abs().amax(1, keepdim=True).float() / torch.finfo(form).max
    return (rows.float() / scale).to(form).double() * scale


def in_eight_bits():
    rank, world = dist.get_rank(), dist.get_world_size()
    channel = Fp8Channel(dist.group.WORLD)
    generator = torch.Generator().manual_seed(0)
    every = torch.randn(world, 5, 7 * world, generator=generator, dtype=torch.float64) * 100
    for line, form in ((channel, torch.float8_e4m3fn), (channel.of_gradients, torch.float8_e5m2)):
        gathered = _rounded(every.flatten(1), form).view(every.shape)
        assert_close(gathered, line.all_gather(every[rank]), "gathered", 1e-7)
        parts = torch.stack([_rounded(one.reshape(world, -1), form) for one in every])  # from, to
        own = parts[:, rank].sum(0)
        assert_close(own, line.reduce_scatter(every[rank].view(world, -1)), "scattered", 1e-6)
        total = _rounded(parts.sum(0), form).view(every[0].shape)
        for x in (line.all_reduce(every[rank].clone()), line.start_all_reduce(every[rank].clone()).wait()):
            assert_close(total, x, "summed", 1e-6)
            assert equal_on_ranks(x)
    assert_close(every.sum(0), channel.exact.all_reduce(every[rank].clone()), "as it is")
    numbers = torch.arange(3) + 1000
    assert torch.equal(channel.all_reduce(numbers + rank), world * numbers + sum(range(world)))
    for lost in (float("nan"), float("inf")):
        every[0, 0, 0] = lost
        assert not channel.all_reduce(every[rank].clone()).flatten()[0].isfinite(), "what overflows stays visible"
    assert torch.equal(channel.all_reduce(torch.zeros(4)), torch.zeros(4))
    linear = nn.Linear(4, 6, dtype=torch.float64)
    for parameter in linear.parameters():
        dist.broadcast(parameter.detach(), 0)
    split = ColumnLinear.from_native_module(copy.deepcopy(linear), fp8_context(), gather_output=True)
    assert_close(linear(torch.ones(2, 4).double()), split(torch.ones(2, 4).double()), "what is returned")
    states, tokens = SequenceShard(fp8_context()), every[0, None, :, :4].nan_to_num()
    assert torch.equal(states.gather(states.scatter(tokens)), tokens), "what a stack returns"


def fp8_context():
    return ShardContext.of(build_mesh(Sizes(tp=dist.get_world_size())), fp8=True)


@pytest.mark.parametrize("world", [2, 3])
def test_what_travels_in_eight_bits_is_rounded_and_nothing_else(pool, world):
    pool.run(in_eight_bits, world=world)


def test_half_of_the_bytes_of_bfloat16():
    part = torch.randn(1, 4096, dtype=torch.bfloat16)
    assert pack(part, torch.float8_e4m3fn).nbytes <= 0.51 * part.nbytes


def fewer_bytes():
    reference, model = twins()
    half = shard(copy.deepcopy(reference), fp8_communication=True)
    assert type(context_of(half).channel) is Fp8Channel
    ids = batch()
    wanted, plain = _step(model, ids)
    loss, sent = _step(half, ids)
    # Activations of 8 bytes become 1, twice: to the ranks of the sums, and back to all. What is exact is as large.
    assert sum(sent.bytes) < sum(plain.bytes) * 0.5
    assert_close(wanted, loss, "loss", 0.02)
    assert not torch.equal(wanted, loss), "nothing was rounded"
    for (name, parameter), other in zip(model.named_parameters(), half.parameters(), strict=True):
        got, want = other.grad.full_tensor(), parameter.grad.full_tensor()
        assert (got - want).norm() < 0.4 * want.norm() + 0.1, name
        if all(placement.is_replicate() for placement in other.placements):
            assert equal_on_ranks(other.grad), f"{name}: ranks differ"


def test_a_whole_model_sends_less(pool):
    pool.run(fewer_bytes, world=2)


def exact_sums():
    rank, world = dist.get_rank(), dist.get_world_size()
    own = [torch.tensor([1.001 + r, 0.3 * r], dtype=torch.float64) for r in range(world)]
    (total,) = all_reduce_bucket([own[rank].clone()], Fp8Channel(dist.group.WORLD))
    assert_close(sum(own), total, "gradients of replicated parameters")


def test_gradients_of_replicated_parameters_are_sent_as_they_are(pool):
    pool.run(exact_sums, world=2)


def compiled_half():
    model = shard(build(checkpoint=None), fp8_communication=True)
    ids = batch()
    loss, _ = _step(model, ids)
    eager = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled = torch.compile(model, backend="aot_eager")(ids, labels=ids)
    compiled.backward()
    assert_close(loss, compiled.detach(), "loss")
    for name, parameter in model.named_parameters():
        assert_close(eager[name], parameter.grad.full_tensor(), name)


@TRACES
@pytest.mark.nightly
@pytest.mark.filterwarnings(UPSTREAM)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo looks
def test_a_model_that_sends_less_compiles(pool):
    pool.run(compiled_half, world=2)
