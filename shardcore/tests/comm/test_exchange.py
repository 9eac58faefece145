from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardcore.comm.collectives import Channel
from shardcore.comm.exchange import Exchange, exchange_rows, misused
from shardcore.errors import WrapError
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close

#: By the number of ranks: what each uses of 10 rows. Rows that several use, that nobody does, repeated ones, all.
USED = {
    2: [(((0, 3), (7, 9)), ((2, 4), (2, 4), (9, 10))), (((0, 10),), ((9, 10), (0, 1)))],
    3: [(((0, 1),), ((0, 10),), ((3, 9),)), (((0, 4),), ((4, 8),), ((8, 10),))],
    4: [(((8, 10),), ((6, 8),), ((2, 5),), ((0, 3),)), (((0, 3),), ((3, 6),), ((6, 9),), ((9, 10),))],
}


def moves(compiled):
    channel, rank, world = Channel(dist.group.WORLD), dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    for used in USED[world]:
        generator = torch.Generator().manual_seed(0)
        kinds = [((10, 3), 0, torch.float64), ((4, 10), 1, torch.float64), ((10,), 0, torch.float32)]
        whole = [torch.randn(*shape, generator=generator).to(dtype) for shape, _, dtype in kinds]
        parts = [
            distribute_tensor(t, mesh, [Shard(dim)], src_data_rank=None).requires_grad_()
            for t, (_, dim, _) in zip(whole, kinds, strict=True)
        ]
        exchanges = [Exchange(used, 10, rank, dim) for _, dim, _ in kinds]
        if compiled:
            found = torch.compile(exchange_rows, backend="aot_eager")(channel, exchanges, parts)
        else:
            with Collectives() as sent:
                found = exchange_rows(channel, exchanges, parts)
            assert sent.counts["alltoall_base"] == 2, "one for each dtype"
        sum((t * t).sum().double() for t in found).backward()
        wanted = [t.clone().requires_grad_() for t in whole]
        for (_, dim, _), full, got in zip(kinds, wanted, found, strict=True):
            assert_close(_rows(full, used[rank], dim).detach(), got.detach(), "rows")
            sum((_rows(full, runs, dim) ** 2).sum() for runs in used).backward()
        for full, part in zip(wanted, parts, strict=True):
            assert part.grad.placements == part.placements
            assert_close(full.grad, part.grad.full_tensor(), "gradient", 1e-6 if full.dtype == torch.float32 else 1e-12)


def _rows(full, runs, dim):
    return torch.cat([full.narrow(dim, start, stop - start) for start, stop in runs], dim)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rows_and_their_gradients(pool, world):
    pool.run(moves, False, world=world)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
def test_compiled(pool):
    pool.run(moves, True, world=3)


def a_plain_tensor():
    with pytest.raises(WrapError, match="plain tensor"):
        exchange_rows(Channel(dist.group.WORLD), [Exchange([((0, 1),), ((1, 2),)], 2, 0)], [torch.zeros(2)])


def test_a_plain_tensor_is_refused(pool):
    pool.run(a_plain_tensor, world=2)


def test_what_ranks_cannot_use():
    assert misused(None, "features", 4, 2) is None
    assert misused((((0, 2),), ((1, 4),)), "features", 4, 2) is None
    assert "what 1 ranks use, of 2" in misused((((0, 2),),), "features", 4, 2)
    for wrong in ((((0, 2),), ()), (((0, 2),), ((2, 5),)), (((0, 2),), ((2, 2),))):
        assert "every rank needs runs of at least one of the 4 features" in misused(wrong, "features", 4, 2)
