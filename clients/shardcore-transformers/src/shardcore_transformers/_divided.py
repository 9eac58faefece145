"""Attention between tokens that are divided over the ranks of ``cp``.

*all_to_all* (DeepSpeed-Ulysses, Jacobs et al. 2023, https://arxiv.org/abs/2309.14509): one exchange gives each rank all
tokens of some heads, and one brings the output of its own tokens, all heads, back. The backward sends the same.

*ring_attn* (Liu et al. 2023, https://arxiv.org/abs/2310.01889): keys and values go from neighbour to neighbour while
the last ones are computed with; outputs are put together by their logsumexp. In the backward they go round once more,
and their gradients with them, which arrive at home after the last step.

Both together: neighbours exchange heads, and keys and values go round between such groups (USP, Fang and Zhao 2024,
https://arxiv.org/abs/2405.07719).

Shapes: queries (B, H, L, D), keys (B, K, L, D), values (B, K, L, E) of this rank's L tokens; outputs (B, L, H, E).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.collectives import Channel, Pending, refuse_double_backward
from shardcore.comm.exchange import Exchanged
from shardcore.comm.gradients import PASSES
from shardcore.nn.context.places import Places, Spans, cut, total
from shardcore.nn.context.shard import Groups
from shardcore_transformers._blocks import Block, TokenMask, attend_block, attend_block_backward, merge, no_output

#: A library's attention of some queries to all keys: (B, H, Lq, D), (B, H, S, D), (B, H, S, E) and what they see, a
#: mask (B or 1, H or 1, Lq, S); returns (B, Lq, H, E).
Inner = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


class _Exchanged(Exchanged):
    flow = PASSES  # over ``tp``


def _exchange(
    channel: Channel, going: Sequence[Sequence[Tensor]], coming: Sequence[Sequence[tuple[int, ...]]]
) -> list[list[Tensor]]:
    """Send each rank its tensors and return what came from each, of the given shapes, by one all-to-all."""
    sent = [sum(x.numel() for x in pieces) for pieces in going]
    sizes = [[torch.Size(shape).numel() for shape in shapes] for shapes in coming]
    flat = torch.cat([x.reshape(-1) for pieces in going for x in pieces])
    came: Tensor = _Exchanged.apply(flat, channel, sent, [sum(own) for own in sizes])  # type: ignore[no-untyped-call]
    pieces = iter(came.split([size for own in sizes for size in own]))
    return [[next(pieces).view(shape) for shape in shapes] for shapes in coming]


class _Heads(NamedTuple):
    """Which heads each of the ranks that exchange them has."""

    queries: list[tuple[int, int]]
    keys: list[tuple[int, int]]  # that these queries use; ranks may use the same ones
    groups: int  # queries for each key

    @classmethod
    def of(cls, queries: int, keys: int, ranks: int) -> _Heads:
        groups = queries // keys
        own = [(queries * r // ranks, queries * (r + 1) // ranks) for r in range(ranks)]
        return cls(own, [(a // groups, (b - 1) // groups + 1) for a, b in own], groups)

    def own_keys(self, x: Tensor, rank: int) -> Tensor:
        """Return keys (B, K, ...) of a rank so that each is that of as many of its queries, one after the other."""
        (first, last), (start, stop) = self.queries[rank], self.keys[rank]
        used = [head // self.groups - start for head in range(first, last)]
        keys = stop - start
        if len(used) % keys == 0 and used == [i * keys // len(used) for i in range(len(used))]:
            return x
        return x[:, torch.tensor(used, device=x.device)]


def _to_heads(
    q: Tensor, k: Tensor, v: Tensor, heads: _Heads, channel: Channel, parts: Sequence[Spans]
) -> tuple[Tensor, Tensor, Tensor]:
    """Give all tokens of some heads for some tokens of all heads."""
    going = []
    for (a, b), (c, d) in zip(heads.queries, heads.keys, strict=True):
        going.append([q[:, a:b], k[:, c:d], v[:, c:d]])
    (a, b), (c, d), batch = heads.queries[channel.rank], heads.keys[channel.rank], q.size(0)
    shapes = []
    for spans in parts:
        n = total(spans)
        shapes.append([(batch, b - a, n, q.size(-1)), (batch, d - c, n, k.size(-1)), (batch, d - c, n, v.size(-1))])
    came = _exchange(channel, going, shapes)
    q, k, v = (torch.cat([pieces[i] for pieces in came], 2) for i in range(3))
    return q, heads.own_keys(k, channel.rank), heads.own_keys(v, channel.rank)


def _to_tokens(out: Tensor, heads: _Heads, channel: Channel, parts: Sequence[Spans]) -> Tensor:
    """Undo `_to_heads` for the output: (B, h, N, E) to (B, H, L, E)."""
    going = [[piece] for piece in out.split([total(spans) for spans in parts], 2)]
    own = total(parts[channel.rank])
    shapes = [[(out.size(0), b - a, own, out.size(-1))] for a, b in heads.queries]
    return torch.cat([pieces[0] for pieces in _exchange(channel, going, shapes)], 1)


class _Course(NamedTuple):
    """How keys and values go round, and what queries see of them."""

    channel: Channel | None  # None if there is one rank, which sends nothing
    parts: tuple[Spans, ...]  # the tokens of each rank of the ring
    mask: TokenMask
    scale: float

    @property
    def rank(self) -> int:
        return 0 if self.channel is None else self.channel.rank

    def blocks(self, source: int, device: torch.device) -> Iterator[tuple[slice, slice, Block]]:
        """Yield the blocks between this rank's queries and the keys of another one, with their places in both."""
        keys = list(_placed(self.parts[source]))
        for own, queries in _placed(self.parts[self.rank]):
            for other, span in keys:
                if not self.mask.empty(queries, span, device):
                    yield own, other, Block(queries, span, self.mask)

    def travel(self, pair: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield the keys and values of each rank, this one's first, while the next are under way."""
        n = len(self.parts)
        for step in range(n):
            source = (self.rank - step) % n
            coming = self.channel.start_shift(pair) if self.channel is not None and step + 1 < n else None
            yield source, pair
            if coming is not None:
                pair = coming.wait()


def _placed(spans: Spans) -> Iterator[tuple[slice, tuple[int, int]]]:
    at = 0
    for start, stop in spans:
        yield slice(at, at + stop - start), (start, stop)
        at += stop - start


def _packed(k: Tensor, v: Tensor, course: _Course) -> Tensor:
    """Return keys and values as one buffer, as long as that of any rank: (B, K, most, D + E)."""
    both = torch.cat([k, v], -1)
    missing = max(map(total, course.parts)) - k.size(2)
    return both if not missing else torch.cat([both, both.new_zeros(*both.shape[:2], missing, both.size(-1))], 2)


class _Ring(Function):
    flow = PASSES  # over ``tp``

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, course: _Course) -> Tensor:
        out, lse = no_output(q, v)
        for source, pair in course.travel(_packed(k, v, course)):
            keys, values = pair.split([k.size(-1), v.size(-1)], -1)
            for own, other, block in course.blocks(source, q.device):
                found = attend_block(q[:, :, own], keys[:, :, other], values[:, :, other], block, course.scale)
                merge(out[:, :, own], lse[:, :, own], *found)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse.masked_fill_(lse.isneginf(), 0))
        ctx.course = course
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        refuse_double_backward()
        q, k, v, out, lse = ctx.saved_tensors
        course: _Course = ctx.course
        widths, grad = [k.size(-1), v.size(-1)], grads[0]
        wide = torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)
        packed = _packed(k, v, course)
        home = torch.zeros_like(packed, dtype=wide)  # the gradients of the keys and values that are here
        arriving: Pending | None = None
        for source, pair in course.travel(packed):
            keys, values = pair.split(widths, -1)
            own_part = torch.zeros_like(home)
            dk, dv = own_part.split(widths, -1)
            for own, other, block in course.blocks(source, q.device):
                parts = (grad[:, :, own], q[:, :, own], keys[:, :, other], values[:, :, other])
                found = attend_block_backward(*parts, out[:, :, own], lse[:, :, own], block, course.scale)
                dq[:, :, own] += found[0]
                dk[:, :, other] += found[1]
                dv[:, :, other] += found[2]
            home = own_part if arriving is None else arriving.wait().add_(own_part)
            arriving = course.channel.start_shift(home) if course.channel is not None else None
        if arriving is not None:
            home = arriving.wait()
        dk, dv = home[:, :, : k.size(2)].split(widths, -1)
        return dq.to(q.dtype), dk.to(k.dtype).contiguous(), dv.to(v.dtype).contiguous(), None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: TokenMask,
    groups: Groups,
    places: Places,
    *,
    scale: float,
    inner: Inner | None = None,
) -> Tensor:
    """Return the attention of this rank's tokens to those of all ranks.

    Args:
        q: (B, H, L, D).
        k: (B, K, L, D).
        v: (B, K, L, E).
        mask: what tokens see.
        groups: the ranks.
        places: which tokens each has.
        scale: of the scores.
        inner: what computes attention of heads whose tokens are all here, some queries at a time; None: the blocks of
            `shardcore_transformers._blocks`, which know no dropout. Nothing may go round then.

    Returns:
        (B, L, H, E).
    """
    if q.is_meta:  # what a block sees depends on a mask, which may have numbers; what it returns does not
        return q.new_empty(q.size(0), q.size(2), q.size(1), v.size(3))
    ring = groups.ring.rank if groups.ring else 0
    exchange = groups.heads
    heads = _Heads.of(q.size(1), k.size(1), exchange.size if exchange else 1)
    parts = places.ranks[ring * len(heads.queries) :][: len(heads.queries)]
    if exchange is not None:
        q, k, v = _to_heads(q, k, v, heads, exchange, parts)
    if inner is not None:
        k, v = (x if x.size(1) == q.size(1) else x.repeat_interleave(q.size(1) // x.size(1), 1) for x in (k, v))
        out = _in_pieces(q, k, v, mask, len(places.ranks), inner)
    else:
        rings = places.rings
        if groups.ring is None and mask.kind == "other":
            rings = (tuple(piece for spans in cut(rings[0], len(places.ranks)) for piece in spans),)
        out = _Ring.apply(q, k, v, _Course(groups.ring, rings, mask, scale))  # type: ignore[no-untyped-call]
    if exchange is not None:
        out = _to_tokens(out, heads, exchange, parts)
    return out.transpose(1, 2).contiguous()


def _in_pieces(q: Tensor, k: Tensor, v: Tensor, mask: TokenMask, pieces: int, inner: Inner) -> Tensor:
    """Compute attention for some queries at a time, again in the backward: no mask of S x S is there, nor kept."""

    def piece(some: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
        keys = torch.arange(k.size(2), device=q.device)
        return inner(some, k, v, mask.block(keys[start : start + some.size(2)], keys)).transpose(1, 2)

    found = []
    for ((start, stop),) in cut(((0, q.size(2)),), pieces):
        some = q[:, :, start:stop]
        out = torch.utils.checkpoint.checkpoint(piece, some, k, v, start, use_reentrant=False)
        found.append(out)
    return torch.cat(found, 2)
