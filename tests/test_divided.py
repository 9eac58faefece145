"""Attention between tokens that are divided over ranks equals attention of whole ones, and no rank has a whole mask."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from shardcore.comm.collectives import Channel
from shardcore.nn.context.places import gather_tokens, tokens_of, total
from shardcore.nn.context.shard import Groups
from shardcore_testing.observing import Collectives
from shardcore_transformers._blocks import Block, TokenMask, attend_block, attend_block_backward
from shardcore_transformers._divided import attend

_LENGTH = 19
_SEGMENTS = torch.tensor([[0] * 7 + [1] * 12, [0] * 3 + [1] * 9 + [2] * 7])
_REAL = torch.ones(2, _LENGTH, dtype=torch.bool)
_REAL[0, :4] = _REAL[1, -5:] = False


class _Mask(TokenMask):
    def __init__(self, kind):
        super().__init__(kind if kind in ("causal", "full") else "other")
        self.what, self.largest = kind, 0

    def block(self, queries, keys):
        seen = (queries[:, None] >= keys[None])[None, None]
        if self.what == "full":
            seen = torch.ones_like(seen)
        if self.what == "padded":
            seen = seen & _REAL[:, None, None, keys]
        if self.what == "packed":
            seen = seen & (_SEGMENTS[:, queries][:, :, None] == _SEGMENTS[:, keys][:, None]).unsqueeze(1)
        if self.what == "window":
            seen = seen & (queries[:, None] - keys[None] < 4)
        self.largest = max(self.largest, len(queries) * len(keys))
        return seen


_KINDS = ("causal", "full", "padded", "packed", "window")


def _drawn(heads, keys, width, values):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, _LENGTH, width), (2, keys, _LENGTH, width), (2, keys, _LENGTH, values))
    return [torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes]


def _whole(q, k, v, kind):
    at = torch.arange(_LENGTH)
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), 1) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=_Mask(kind).block(at, at), scale=0.4).transpose(1, 2)


def _divided(kind, heads, keys, exchanging, values=8):
    everybody = Channel(dist.group.WORLD)
    groups = Groups(everybody, everybody if exchanging else None, None if exchanging else everybody)
    mask, inputs = _Mask(kind), _drawn(heads, keys, 8, values)
    places = groups.places(_LENGTH, zigzag=kind != "full")
    own = [tokens_of(x, places.ranks[everybody.rank], 2) for x in inputs]
    out = gather_tokens(attend(*own, mask, groups, places, scale=0.4), everybody, places)
    wanted = _whole(*inputs, kind)
    torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = torch.autograd.grad(out, inputs, direction)
    for mine, whole in zip(got, torch.autograd.grad(wanted, inputs, direction), strict=True):
        dist.all_reduce(mine)  # its mean over the ranks is the gradient
        torch.testing.assert_close(mine / everybody.size, whole, rtol=0, atol=1e-12)
    most = max(map(total, places.ranks))
    assert mask.largest <= most * most


def _all_kinds(heads, keys, exchanging):
    for kind in _KINDS:
        _divided(kind, heads, keys, exchanging)
    _divided("padded", heads, keys, exchanging, values=6)  # values of another width: torch has no kernel


@pytest.mark.parametrize("exchanging", [True, False], ids=["all_to_all", "ring_attn"])
@pytest.mark.parametrize(("heads", "keys"), [(4, 2), (5, 1)])
def test_two_ranks(pool, heads, keys, exchanging):
    pool.run(_all_kinds, heads, keys, exchanging)


def _sent(exchanging):
    everybody = Channel(dist.group.WORLD)
    groups = Groups(everybody, everybody if exchanging else None, None if exchanging else everybody)
    places = groups.places(_LENGTH, zigzag=True)
    own = [tokens_of(x, places.ranks[everybody.rank], 2) for x in _drawn(4, 2, 8, 8)]
    found = []
    with Collectives() as collectives:
        out = attend(*own, _Mask("causal"), groups, places, scale=0.4)
        found.append(dict(collectives.counts))
        collectives.take()
        torch.autograd.grad(out.sum(), own)
        found.append(dict(collectives.counts))
    return found


def test_what_is_sent(pool):
    """Two exchanges, and two in the backward; or keys and values go round, and in the backward their gradients too."""
    assert pool.run(_sent, True) == [[{"alltoall_base": 2}] * 2] * 2
    assert pool.run(_sent, False) == [[{"send": 1, "recv": 1}, {"send": 3, "recv": 3}]] * 2


def test_a_query_that_sees_nothing():
    """Its output is zero, it gives no gradient, and nothing becomes NaN."""
    for width in (8, 6):  # by torch's kernel, and without one
        q, k, v = (x.detach() for x in _drawn(4, 2, 8, width))
        block = Block((0, _LENGTH), (0, _LENGTH), _Mask("padded"))
        out, lse = attend_block(q, k, v, block, 0.4)
        assert not out[0, :, :4].any()
        assert lse[0, :, :4].isneginf().all()
        grads = attend_block_backward(
            torch.ones_like(out), q, k, v, out, lse.masked_fill(lse.isneginf(), 0), block, 0.4
        )
        assert not grads[0][0, :, :4].any()
        assert all(grad.isfinite().all() for grad in grads)
