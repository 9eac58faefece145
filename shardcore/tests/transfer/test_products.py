"""Products of tokens while others travel: what comes of them is what comes of one product."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from shardcore.comm.collectives import Channel
from shardcore.comm.sequence import all_gather_tokens, local_tokens, own_tokens, reduce_scatter_tokens
from shardcore.transfer import products
from shardcore.transfer.products import gather_products, scatter_product, without_kernels
from shardcore_testing.observing import Collectives

SHAPES = [(1, 8), (2, 8), (2, 7), (3, 5), (1, 2)]


class Kernels:
    """In the place of torch's, which take no tensor of a CPU: the same in plain steps."""

    calls = 0

    def fused_all_gather_matmul(self, x, weights, dim, name):
        assert (dim, name, x.is_contiguous()) == (1, dist.group.WORLD.group_name, True)
        Kernels.calls += 1
        whole = torch.cat([*Channel(dist.group.WORLD).all_gather(x)], dim)
        return whole, [whole @ weight for weight in weights]

    def fused_matmul_reduce_scatter(self, x, weight, how, dim, name):
        assert (how, dim, name) == ("sum", 1, dist.group.WORLD.group_name)
        Kernels.calls += 1
        channel = Channel(dist.group.WORLD)
        return channel.reduce_scatter(torch.stack((x @ weight).chunk(channel.size, dim)))


def _linears():
    torch.manual_seed(0)
    return nn.Linear(6, 4).double(), nn.Linear(6, 5, bias=False).double()


def alike(overlap, rows):
    channel, (first, second) = Channel(dist.group.WORLD), _linears()
    assert without_kernels("cuda") is None  # which defines them
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(products, "_ROWS", rows)
        patch.setattr(torch.ops, "symm_mem", Kernels())
        for batch, length in SHAPES:
            torch.manual_seed(1)
            every = torch.randn(batch, length, 6, dtype=torch.float64)
            own = own_tokens(every, channel)
            with Collectives() as sent:
                whole, made = gather_products(
                    own, [(each.weight, each.bias) for each in (first, second)], channel, length, overlap
                )
            assert torch.equal(whole, every)
            for linear, product in zip((first, second), made, strict=True):
                torch.testing.assert_close(product, linear(every), rtol=1e-14, atol=1e-14)
                product.mul_(2)  # no view, which could not be changed
            if overlap is True:
                pieces = min(8, local_tokens(length, channel.size)) if rows == 1 else 1
                assert sum(sent.counts.values()) <= pieces
            summand = every * (1 + channel.rank)
            got = scatter_product(summand, first.weight, channel, overlap)
            wanted = reduce_scatter_tokens(F.linear(summand, first.weight), channel)
            torch.testing.assert_close(got, wanted, rtol=1e-14, atol=1e-14)
            if overlap is True and rows > 1:
                assert torch.equal(got, wanted)
            assert torch.equal(all_gather_tokens(own, channel, length), every)
    assert Kernels.calls == (2 * len(SHAPES) if overlap == "symm_mem" else 0)
    Kernels.calls = 0


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(("overlap", "rows"), [(True, 1), (True, 512), ("symm_mem", 1)])
def test_products_of_tokens_that_travel(pool, overlap, rows, world):
    pool.run(alike, overlap, rows, world=world)


def under_autocast():
    channel, (linear, _) = Channel(dist.group.WORLD), _linears()
    own = torch.randn(1, 2, 6)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        whole, (made,) = gather_products(own, [(linear.weight.float(), None)], channel, 4, "symm_mem")
    assert (whole.dtype, made.dtype) == (torch.float32, torch.bfloat16)


def test_autocast_needs_pieces(pool):
    pool.run(under_autocast, world=2)


def test_torch_s_kernels_are_those_of_cards():
    assert without_kernels("cuda") is None
    assert without_kernels("cpu") == "symmetric memory is that of CUDA devices, and this is cpu"
