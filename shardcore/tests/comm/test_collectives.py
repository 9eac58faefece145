from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardcore.comm.collectives import Channel, chunk_bounds, copy_to_tp, gather_from_tp, reduce_from_tp, split_to_tp
from shardcore.errors import NotSupportedError
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close

UPSTREAM = "ignore:.*Function.* should not be instantiated:DeprecationWarning"  # torch._dynamo does it
ROWS = 3


def _tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _world():
    channel = Channel(dist.group.WORLD)
    return channel, channel.rank, channel.size


def _part(full, dim):
    _, rank, world = _world()
    start, stop = chunk_bounds(full.size(dim), world, rank)
    return full.narrow(dim, start, stop - start).clone()


def copy_and_reduce(size):
    """A column and a row product around the pair, against the whole product."""
    channel, rank, world = _world()
    x, w1, w2 = _tensor(ROWS, size), _tensor(6 * world, size, seed=1), _tensor(size, 6 * world, seed=2)
    wanted = x.clone().requires_grad_()
    ((wanted @ w1.t()).tanh() @ w2.t()).pow(2).sum().backward()
    for fresh in (False, True):
        got = x.clone().requires_grad_()
        rows = slice(6 * rank, 6 * rank + 6)
        out = reduce_from_tp((copy_to_tp(got, channel) @ w1[rows].t()).tanh() @ w2[:, rows].t(), channel, fresh=fresh)
        out.pow(2).sum().backward()
        assert_close((x @ w1.t()).tanh() @ w2.t(), out, f"fresh={fresh}")
        assert_close(wanted.grad, got.grad, f"gradient, fresh={fresh}")


def gather_and_split(size):
    channel, _rank, _ = _world()
    for dim in (1, -1, 0):
        shape = (size, 4) if dim == 0 else (2, size) if dim == -1 else (2, size, 3)
        full, weight = _tensor(*shape), _tensor(*shape, seed=1)
        axis = dim % full.ndim
        wanted = full.clone().requires_grad_()
        (wanted.sin() * weight).sum().backward()

        part = _part(full, axis).requires_grad_()
        whole = gather_from_tp(part.sin(), channel, dim, size)
        assert_close(full.sin(), whole, f"gather dim {dim}")
        (whole * weight).sum().backward()
        assert_close(_part(wanted.grad, axis), part.grad, f"gather's gradient, dim {dim}")

        got = full.clone().requires_grad_()
        own = split_to_tp(got, channel, dim)
        assert_close(_part(full, axis), own, f"split dim {dim}")
        (own.sin() * _part(weight, axis)).sum().backward()
        assert_close(wanted.grad, got.grad, f"split's gradient, dim {dim}")
        assert_close(full, gather_from_tp(split_to_tp(full, channel, dim), channel, dim, size), "there and back")


@pytest.mark.parametrize("world", [2, 3, 4])
def test_pairs_equal_the_plain_computation(pool, world):
    pool.run(copy_and_reduce, 97, world=world)
    pool.run(gather_and_split, 97, world=world)


def test_more_ranks_than_parts(pool):
    pool.run(gather_and_split, 5, world=4)  # 2, 2, 1 and nothing


def shared_gradients():
    channel, rank, world = _world()
    x = _tensor(4).requires_grad_()
    entered = copy_to_tp(x, channel)
    beside = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    # The sum hands ONE gradient tensor to both branches.
    (entered + beside).backward(torch.full((4,), rank + 1.0, dtype=torch.float64))
    assert beside.grad.tolist() == [rank + 1.0] * 4
    assert x.grad.tolist() == [sum(range(1, world + 1))] * 4


def expanded_gradients():
    channel, _, world = _world()
    x = _tensor(2, 3).requires_grad_()
    copy_to_tp(x, channel).sum().backward()  # the gradient of a sum has stride zero
    assert x.grad.tolist() == [[float(world)] * 3] * 2


def inputs_survive():
    channel, _, world = _world()
    x = torch.ones(5, dtype=torch.float64)
    kept = reduce_from_tp(x, channel)
    assert (x.tolist(), kept.tolist()) == ([1.0] * 5, [float(world)] * 5)
    y = torch.ones(5, dtype=torch.float64)
    assert reduce_from_tp(y, channel, fresh=True).data_ptr() == y.data_ptr(), "fresh= saves the copy"
    leaf = torch.ones(5, dtype=torch.float64, requires_grad=True)
    reduce_from_tp(leaf * 2, channel, fresh=True).sum().backward()
    assert leaf.grad.tolist() == [2.0] * 5
    for fresh in (False, True):
        assert reduce_from_tp(torch.full((2,), 1 + 2j), channel, fresh=fresh).tolist() == [world * (1 + 2j)] * 2


def costs():
    channel = Channel(dist.group.WORLD)
    x = _tensor(4, 5).requires_grad_()
    counted = {}
    for name, call in {
        "copy": lambda: copy_to_tp(x, channel),
        "reduce": lambda: reduce_from_tp(x * 1, channel, fresh=True),
        "gather": lambda: gather_from_tp(split_to_tp(x.detach(), channel, 0).requires_grad_(), channel, 0, 4),
        "split": lambda: split_to_tp(x, channel, 1),
    }.items():
        with Collectives() as forward:
            out = call()
        with Collectives() as backward:
            out.sum().backward()
        counted[name] = (forward.count, backward.count)
    return counted


def test_gradients_and_inputs_are_not_corrupted(pool):
    pool.run(shared_gradients, world=3)
    pool.run(expanded_gradients, world=2)
    pool.run(inputs_survive, world=2)


def test_number_of_collectives(pool):
    assert pool.run(costs, world=2)[0] == {"copy": (0, 1), "reduce": (1, 0), "gather": (1, 0), "split": (0, 1)}


def second_derivatives():
    channel = Channel(dist.group.WORLD)
    x = _tensor(4).requires_grad_()
    for call in (copy_to_tp, lambda t, g: split_to_tp(t, g, 0)):
        with pytest.raises(NotSupportedError, match="create_graph=True through a tensor-parallel module: second deriv"):
            torch.autograd.grad(call(x, channel).pow(2).sum(), x, create_graph=True)


def test_second_derivatives_are_refused(pool):
    pool.run(second_derivatives, world=2)


def compiled(rows):
    channel, rank, _ = _world()

    def pairs(x):
        y = reduce_from_tp(copy_to_tp(x, channel) * (rank + 1), channel, fresh=True)
        z = gather_from_tp(split_to_tp(y, channel, 1).sin(), channel, 1, 5)
        return reduce_from_tp(z, channel) + y

    x = _tensor(rows, 5)
    wanted, got = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = pairs(wanted)
    out.pow(2).sum().backward()
    traced = torch.compile(pairs, backend="aot_eager", fullgraph=True)(got)
    traced.pow(2).sum().backward()
    assert_close(out, traced, "compiled output")
    assert_close(wanted.grad, got.grad, "compiled gradient")


@pytest.mark.nightly
@pytest.mark.filterwarnings(UPSTREAM)
@pytest.mark.parametrize(("rows", "world"), [(3, 2), (3, 3), (1, 2)])
def test_compiled_equals_eager(pool, rows, world):
    pool.run(compiled, rows, world=world)


def test_bounds_are_those_of_chunk():
    for size in (1, 5, 8, 97):
        for parts in (1, 2, 3, 4, 8):
            lengths = [stop - start for start, stop in (chunk_bounds(size, parts, i) for i in range(parts))]
            wanted = [len(chunk) for chunk in torch.arange(size).chunk(parts)]
            assert lengths == wanted + [0] * (parts - len(wanted))
