"""Which tokens of a call each rank of ``cp`` has, and how tensors with all tokens become theirs and whole again.

A gradient is right here if its mean over the ranks of ``cp`` is: parameters' gradients are averaged over them by FSDP2,
as over replicas. What a rank computes from its own tokens alone counts for all ranks, so that its gradient is as many
times too large: `gather_tokens` multiplies, and nothing else has to.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.collectives import Channel, refuse_double_backward
from shardcore.comm.gradients import PASSES

#: Consecutive tokens, (first, one past the last), one piece after the other.
Spans = tuple[tuple[int, int], ...]


def cut(spans: Spans, parts: int) -> list[Spans]:
    """Cut the tokens of ``spans`` in pieces that differ by one token at most; none is empty if there are enough."""
    size, pieces = total(spans), []
    bounds = [size * i // parts for i in range(parts + 1)]
    starts = [0]
    for start, stop in spans:
        starts.append(starts[-1] + stop - start)
    for low, high in itertools.pairwise(bounds):
        piece = []
        for (start, _), at, end in zip(spans, starts, starts[1:], strict=False):
            a, b = max(low, at), min(high, end)
            if a < b:
                piece.append((start + a - at, start + b - at))
        pieces.append(tuple(piece))
    return pieces


def total(spans: Spans) -> int:
    """Return the number of tokens."""
    return sum(stop - start for start, stop in spans)


@dataclass(frozen=True, slots=True)
class Places:
    """Which of the S tokens of a call each rank has.

    Attributes:
        length: S.
        rings: the tokens of each rank of a ring, which those that exchange heads have together.
        ranks: the tokens of each rank of ``cp``; ranks that exchange heads are neighbours.
    """

    length: int
    rings: tuple[Spans, ...]
    ranks: tuple[Spans, ...]

    @classmethod
    def of(cls, length: int, heads: int, rings: int, *, zigzag: bool) -> Places:
        """Divide ``length`` tokens, at least twice as many as ranks, over ``rings`` groups of ``heads`` ranks.

        The ranks of a group exchange heads, and keys and values go round between groups. With ``zigzag``, rank r of a
        ring has the pieces r and 2n-1-r of 2n: where tokens see those before them alone, all have as much to do
        (Grattafiori et al. 2024, https://arxiv.org/abs/2407.21783, section 3.3.2).
        """
        whole = ((0, length),)
        if zigzag and rings > 1:
            pieces = cut(whole, 2 * rings)
            parts = tuple(pieces[r] + pieces[2 * rings - 1 - r] for r in range(rings))
        else:
            parts = tuple(cut(whole, rings))
        return cls(length, parts, tuple(piece for part in parts for piece in cut(part, heads)))


def tokens_of(x: Tensor, spans: Spans, dim: int = 1) -> Tensor:
    """Return some of the tokens of ``x``, which has all of them along ``dim``; its gradient is zero at the others."""
    pieces = [x.narrow(dim, start, stop - start) for start, stop in spans]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def whole_of(parts: Sequence[Tensor], ranks: Sequence[Spans]) -> Tensor:
    """Put the tokens of all ranks, (B, L, ...) each, in their order: (B, S, ...)."""
    pieces = []
    for part, spans in zip(parts, ranks, strict=True):
        at = 0
        for start, stop in spans:
            pieces.append((start, part.narrow(1, at, stop - start)))
            at += stop - start
    return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], 1)


def _padded(x: Tensor, size: int) -> Tensor:
    missing = size - x.size(1)
    return x if not missing else torch.cat([x, x.new_zeros(x.size(0), missing, *x.shape[2:])], 1)


class _GatherTokens(Function):
    flow = PASSES  # over ``tp``

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, places: Places) -> Tensor:
        ctx.channel, ctx.places = channel, places
        most = max(map(total, places.ranks))
        return whole_of(channel.all_gather(_padded(x, most)).unbind(0), places.ranks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        refuse_double_backward()
        ranks = ctx.places.ranks
        most = max(map(total, ranks))
        stacked = torch.stack([_padded(tokens_of(grads[0], spans), most) for spans in ranks])
        own: Tensor = ctx.channel.reduce_scatter(stacked)
        return own.narrow(1, 0, total(ranks[ctx.channel.rank])).contiguous(), None, None


def gather_tokens(x: Tensor, channel: Channel, places: Places) -> Tensor:
    """Put the tokens of all ranks together, (B, L, ...) to (B, S, ...): all-gather, and reduce-scatter in the backward.

    The sum of what ranks have of the gradient is as many times the mean as there are: what counts for all of them.
    """
    return _GatherTokens.apply(x, channel, places)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


class _SumOfRanks(Function):
    flow = PASSES  # over ``tp``

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return channel.exact.all_reduce(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_double_backward()
        return ctx.channel.exact.all_reduce(grads[0].contiguous().clone()), None


def sum_of_ranks(x: Tensor, channel: Channel) -> Tensor:
    """Return the sum of what all ranks have; all-reduce forward and backward, for the reason of `gather_tokens`."""
    return _SumOfRanks.apply(x, channel)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch
