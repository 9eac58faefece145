"""Collectives along the sequence, each with the collective that its gradient needs.

Sequence parallelism (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.2.2) splits along the
sequence what tensor parallelism leaves whole: outside regions each rank holds some of the tokens. Entering a region
gathers them and leaving it scatters the sum, so an all-gather and a reduce-scatter take the place of each all-reduce.

Shapes: (B, S, ...) is whole, S tokens; (B, L, ...) is one rank's part, L = ceil(S / tp) tokens, of which the last ranks
may hold fewer than L or none: the rest is padding, cut off wherever tokens are gathered, so that nothing computed from
it counts and its gradient is zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.collectives import Channel, Pending, packed, refuse_double_backward
from shardcore.comm.gradients import ENTERS, ENTERS_SPLIT, LEAVES, LEAVES_SPLIT


def local_tokens(length: int, ranks: int) -> int:
    """Return L, the number of tokens that each rank holds, padding included."""
    return -(-length // ranks)


def all_gather_tokens(x: Tensor, channel: Channel, length: int) -> Tensor:
    """Put the parts of all ranks together: (B, L, ...) to (B, S, ...), S being ``length``."""
    return join_parts(channel.all_gather(x), length)


def join_parts(stacked: Tensor, length: int) -> Tensor:
    """Return the tokens of all ranks without their padding: (tp, B, L, ...) to (B, S, ...)."""
    ranks, batch, step = stacked.shape[:3]
    if batch == 1:
        return stacked.view(1, ranks * step, *stacked.shape[3:]).narrow(1, 0, length)
    parts = stacked.unbind(0)
    return torch.cat([p.narrow(1, 0, max(0, min(step, length - r * step))) for r, p in enumerate(parts)], 1)


def stack_parts(x: Tensor, ranks: int) -> Tensor:
    """Return what each rank is to hold, padded with zeros: (B, S, ...) to (tp, B, L, ...), contiguous."""
    batch, length = x.shape[:2]
    step = local_tokens(length, ranks)
    if missing := ranks * step - length:
        x = torch.cat([x, x.new_zeros(batch, missing, *x.shape[2:])], 1)
    return x.view(batch, ranks, step, *x.shape[2:]).transpose(0, 1).contiguous()


def start_reduce_scatter(x: Tensor, channel: Channel) -> Pending:
    """Start the sum of ``x`` (B, S, ...) over the ranks, of which each gets its tokens (B, L, ...); eager mode only."""
    return channel.start_reduce_scatter(stack_parts(x, channel.size))


def reduce_scatter_tokens(x: Tensor, channel: Channel) -> Tensor:
    """Sum ``x`` over the ranks and return this rank's tokens: (B, S, ...) to (B, L, ...)."""
    return channel.reduce_scatter(stack_parts(x, channel.size))


def own_tokens(x: Tensor, channel: Channel) -> Tensor:
    """Return this rank's tokens of a tensor that all ranks hold: (B, S, ...) to (B, L, ...), padded with zeros."""
    step, rank = local_tokens(x.size(1), channel.size), channel.rank
    start = min(rank * step, x.size(1))
    part = x.narrow(1, start, min(step, x.size(1) - start))
    if missing := step - part.size(1):
        part = torch.cat([part, part.new_zeros(part.size(0), missing, *part.shape[2:])], 1)
    return packed(part)


class _EnterFromSequence(Function):
    flow = ENTERS_SPLIT

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, length: int) -> Tensor:
        ctx.channel = channel
        return all_gather_tokens(x, channel, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        refuse_double_backward()
        return reduce_scatter_tokens(grads[0], ctx.channel.of_gradients), None, None


class _LeaveToSequence(Function):
    flow = LEAVES_SPLIT

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel, ctx.length = channel, x.size(1)
        return reduce_scatter_tokens(x, channel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_double_backward()
        return all_gather_tokens(grads[0], ctx.channel.of_gradients, ctx.length), None


class _ScatterSequence(_LeaveToSequence):
    flow = ENTERS

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel, ctx.length = channel, x.size(1)
        return own_tokens(x, channel)


class _GatherSequence(_EnterFromSequence):
    flow = LEAVES

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return own_tokens(grads[0], ctx.channel), None, None


def enter_from_sequence(x: Tensor, channel: Channel, length: int) -> Tensor:
    """Enter a region: all-gather forward, reduce-scatter backward; (B, L, ...) to (B, S, ...)."""
    return _EnterFromSequence.apply(x, channel, length)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def leave_to_sequence(x: Tensor, channel: Channel) -> Tensor:
    """Leave a region: reduce-scatter of the summands forward, all-gather backward; (B, S, ...) to (B, L, ...)."""
    return _LeaveToSequence.apply(x, channel)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def scatter_sequence(x: Tensor, channel: Channel) -> Tensor:
    """Keep this rank's tokens forward, all-gather backward; (B, S, ...), the same on all ranks, to (B, L, ...)."""
    return _ScatterSequence.apply(x, channel)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def gather_sequence(x: Tensor, channel: Channel, length: int) -> Tensor:
    """All-gather forward, own tokens backward; (B, L, ...) to (B, S, ...).

    The backward holds if what follows is the same on all ranks, as it is outside regions.
    """
    return _GatherSequence.apply(x, channel, length)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch
