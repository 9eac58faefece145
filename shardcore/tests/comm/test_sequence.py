from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardcore.comm.collectives import Channel
from shardcore.comm.sequence import (
    enter_from_sequence,
    gather_sequence,
    leave_to_sequence,
    local_tokens,
    own_tokens,
    scatter_sequence,
)
from shardcore.errors import NotSupportedError
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close

WIDTH = 6
UPSTREAM = "ignore:.*Function.* should not be instantiated:DeprecationWarning"  # torch._dynamo does it


def _tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def a_block(rows, length, compiled=False):
    """Tokens split, a region between column and row product, tokens whole again, against the plain computation."""
    channel = Channel(dist.group.WORLD)
    rank, world = channel.rank, channel.size
    x, scale = _tensor(rows, length, WIDTH), _tensor(WIDTH, seed=3)
    w1, w2 = _tensor(4 * world, WIDTH, seed=1), _tensor(WIDTH, 4 * world, seed=2)

    def plain(x):
        x = x * scale
        return x + (x.sin() @ w1.t()).tanh() @ w2.t()

    def split(x):
        x = scatter_sequence(x, channel) * scale
        inside = enter_from_sequence(x.sin(), channel, length)
        own = slice(4 * rank, 4 * rank + 4)
        x = x + leave_to_sequence((inside @ w1[own].t()).tanh() @ w2[:, own].t(), channel)
        return gather_sequence(x, channel, length)

    wanted, got = (x.clone().requires_grad_() for _ in range(2))
    first = plain(wanted)
    second = (torch.compile(split, backend="aot_eager", fullgraph=True) if compiled else split)(got)
    assert_close(first, second, f"{rows} rows of {length}")
    for out in (first, second):
        (out * _tensor(*x.shape, seed=4)).sum().backward()
    assert_close(wanted.grad, got.grad, f"gradient, {rows} rows of {length}")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_block(pool, world):
    for rows, length in ((2, 8), (1, 8), (3, 7), (1, 7), (2, 197), (2, world)):
        pool.run(a_block, rows, length, world=world)


@pytest.mark.nightly
@pytest.mark.filterwarnings(UPSTREAM)
@pytest.mark.parametrize(("rows", "length"), [(2, 7), (1, 8)])
def test_compiled(pool, rows, length):
    pool.run(a_block, rows, length, compiled=True, world=2)


def parts(length):
    whole = torch.arange(2.0 * length * 3).view(2, length, 3)
    part = own_tokens(whole, Channel(dist.group.WORLD))
    return part.tolist(), part.is_contiguous()


def test_the_last_part_is_padded_with_zeros(pool):
    whole = torch.arange(30.0).view(2, 5, 3)
    (first, dense), (second, also) = pool.run(parts, 5)
    assert dense
    assert also
    assert torch.equal(torch.tensor(first), whole[:, :3])
    assert torch.equal(torch.tensor(second)[:, :2], whole[:, 3:])
    assert not torch.tensor(second)[:, 2].any()


def test_a_rank_may_hold_padding_only(pool):
    assert local_tokens(5, 4) == 2  # 2, 2, 1 and nothing
    assert not any(map(bool, torch.tensor(pool.run(parts, 5, world=4)[3][0]).flatten()))
    pool.run(a_block, 2, 5, world=4)


def costs():
    channel = Channel(dist.group.WORLD)
    x, part = (_tensor(2, size, WIDTH).requires_grad_() for size in (5, 3))
    counted = []
    for call in (
        lambda: scatter_sequence(x, channel),
        lambda: gather_sequence(part, channel, 5),
        lambda: enter_from_sequence(part, channel, 5),
        lambda: leave_to_sequence(x, channel),
    ):
        with Collectives() as seen:
            out = call()
            forward = seen.take()
            out.sum().backward()
            counted.append((forward, seen.take()))
    return counted


def test_costs(pool):
    assert pool.run(costs)[0] == [(0, 1), (1, 0), (1, 1), (1, 1)]


def second_derivative():
    x = _tensor(2, 3, WIDTH).requires_grad_()
    with pytest.raises(NotSupportedError, match="second derivatives"):
        torch.autograd.grad(enter_from_sequence(x, Channel(dist.group.WORLD), 5).pow(2).sum(), x, create_graph=True)


def test_second_derivatives_are_refused(pool):
    pool.run(second_derivative)


def half():
    """Summands are added in float32, whatever they are sent in."""
    ones = torch.ones(1, 4, 1, dtype=torch.bfloat16)
    return leave_to_sequence(ones * (256 if dist.get_rank() == 0 else 1), Channel(dist.group.WORLD)).flatten().tolist()


def test_sums_of_half_precision(pool):
    assert pool.run(half, world=4) == [[260.0]] * 4  # one by one, in bfloat16, 256 + 1 is 256
