from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from shardcore.comm.collectives import Channel
from shardcore.comm.dispatch import combine, dispatch, plan_dispatch
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close


def rows_of(rank, wanted):
    """Return the rows of one rank: their number differs, and what they want."""
    generator = torch.Generator().manual_seed(rank)
    count = len(wanted[rank])
    rows = torch.randn(count, 5, generator=generator, dtype=torch.float64)
    scales = torch.randn(count, 3, generator=generator, dtype=torch.float32)
    numbers = torch.arange(count * 2).view(count, 2) + 100 * rank
    return rows, scales, numbers


#: By rank and row, the ranks that are to get it: of two ranks, and of three of which one sends and one gets nothing.
WANTED = {
    2: [[[0, 1], [1], [0], []], [[0]]],
    3: [[[1], [1, 2], [2]], [], [[2], [1]]],
}


def travels():
    world, rank = dist.get_world_size(), dist.get_rank()
    wanted, channel = WANTED[world], Channel(dist.group.WORLD)
    mask = torch.tensor([[to in row for to in range(world)] for row in wanted[rank]], dtype=torch.bool)
    plan = plan_dispatch(mask.view(-1, world), channel)
    rows, scales, numbers = rows_of(rank, wanted)
    rows.requires_grad_(), scales.requires_grad_()
    with Collectives() as sent:
        came = dispatch((rows, numbers, scales), plan, factor=world)
    assert sent.counts["alltoall_base"] == 1
    sources = [(source, at) for source in range(world) for at, to in enumerate(wanted[source]) if rank in to]
    for got, kind in zip(came, (0, 2, 1), strict=True):
        everybody = [rows_of(source, wanted)[kind] for source in range(world)]
        expected = [everybody[source][at] for source, at in sources]
        assert torch.equal(got.detach(), torch.stack(expected) if expected else got.detach()[:0])
    assert came[0].requires_grad
    assert not came[1].requires_grad
    made = came[0] * (rank + 1) * came[2].double().sum(-1, keepdim=True)
    back = combine(made, plan, factor=1 / world)
    weight = torch.randn(back.shape, generator=torch.Generator().manual_seed(9 + rank), dtype=torch.float64)
    (back * weight).sum().backward()
    whole, scale, _ = rows_of(rank, wanted)
    whole.requires_grad_(), scale.requires_grad_()
    factors = torch.tensor([sum(to + 1 for to in row) for row in wanted[rank]], dtype=torch.float64).view(-1, 1)
    alone = whole * factors * scale.double().sum(-1, keepdim=True)
    (alone * weight).sum().backward()
    assert_close(alone.detach(), back.detach(), "what came back")
    assert_close(whole.grad, rows.grad, "gradient of rows")
    assert_close(scale.grad, scales.grad, "gradient of scales", 1e-6)


@pytest.mark.parametrize("world", WANTED)
def test_rows_go_and_come_back(pool, world):
    pool.run(travels, world=world)


def divides():
    """What happens in between sees gradients that are divided by the factor on the way in."""
    channel = Channel(dist.group.WORLD)
    plan = plan_dispatch(torch.ones(2, 2, dtype=torch.bool), channel)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    rows = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
    (came,) = dispatch((rows,), plan, factor=2)
    combine(came * scale, plan, factor=0.5).sum().backward()
    assert float(scale.grad) == 4 * 3 / 2
    assert torch.equal(rows.grad, torch.full((2, 3), 2.0, dtype=torch.float64))


def test_factors(pool):
    pool.run(divides)
