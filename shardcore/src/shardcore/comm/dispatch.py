"""Rows that travel to the ranks that compute with them, and back: tokens to the ranks of their experts.

Each rank has rows of its own (T, W), and says which of them each rank is to get. Which and how many is known when it
happens, not before: ranks tell each other the numbers first. A row goes once to each rank that wants it.

Shapes: T rows of this rank; P that it sends, one for each pair of a row and a rank; R that come to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.collectives import Channel, refuse_double_backward
from shardcore.comm.gradients import PASSES


class Dispatch(NamedTuple):
    """Which rows travel where, in one direction and back.

    Attributes:
        channel: between the ranks.
        rows: the places of the rows that this rank sends, (P,), by the rank that they go to.
        sent: how many go to each rank.
        received: how many come from each.
        total: the number of this rank's rows, T.
    """

    channel: Channel
    rows: Tensor
    sent: list[int]
    received: list[int]
    total: int


class _AllToAll(Function):
    """Rows to other ranks, those of several tensors as one message; their gradients come back by the same ways."""

    flow = PASSES  # of what travels along another axis than ``tp``

    @staticmethod
    def forward(
        ctx: Any, channel: Channel, sent: list[int], received: list[int], factor: float, *rows: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.channel, ctx.sent, ctx.received, ctx.factor = channel, sent, received, factor
        ctx.learns = [row.is_floating_point() for row in rows]
        out = _exchanged(rows, channel, sent, received)
        ctx.mark_non_differentiable(*(o for o, learns in zip(out, ctx.learns, strict=True) if not learns))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        going = [grad for grad, learns in zip(grads, ctx.learns, strict=True) if learns]
        back = iter(_exchanged(going, ctx.channel, ctx.received, ctx.sent))
        return None, None, None, None, *(next(back).mul_(ctx.factor) if learns else None for learns in ctx.learns)


def _exchanged(rows: Sequence[Tensor], channel: Channel, sent: list[int], received: list[int]) -> tuple[Tensor, ...]:
    """Return the rows that come, of each tensor; what is sent is the bytes of a row of all, then of the next."""
    pieces = [_bytes(row) for row in rows]
    widths = [piece.size(1) for piece in pieces]
    width = sum(widths)
    flat = channel.exact.exchange(
        torch.cat(pieces, 1).view(-1), [count * width for count in sent], [count * width for count in received]
    )
    came = flat.view(sum(received), width).split(widths, 1)
    # Copies, which numbers of any size may be read from.
    return tuple(_dense(piece).view(row.dtype) for piece, row in zip(came, rows, strict=True))


def _bytes(rows: Tensor) -> Tensor:
    """Return (N, W) numbers as (N, bytes of a row)."""
    # A tensor without numbers, or with one in each row, is contiguous whatever its strides.
    return (rows if rows.is_contiguous() and rows.stride(-1) == 1 else _dense(rows)).view(torch.uint8)


def _dense(rows: Tensor) -> Tensor:
    return rows.clone(memory_format=torch.contiguous_format)


def plan_dispatch(wanted: Tensor, channel: Channel) -> Dispatch:
    """Return who gets which rows: ``wanted`` (T, ranks) is True where a rank is to get one; all ranks call it."""
    numbers = wanted.sum(0)
    ones = [1] * channel.size
    # One wait for the device: how much to send and to make room for is known to the host alone.
    sent, received = torch.stack([numbers, channel.exact.exchange(numbers, ones, ones)]).tolist()
    return Dispatch(channel, wanted.t().nonzero()[:, 1], sent, received, wanted.size(0))


def dispatch(rows: Sequence[Tensor], plan: Dispatch, factor: float = 1.0) -> tuple[Tensor, ...]:
    """Return the rows that come to this rank, of several tensors that every rank has: (T, W) each to (R, W).

    Backward, for floating tensors: the gradients of one row are sent back, multiplied by ``factor``, and added up.
    """
    own = [row[plan.rows] for row in rows]
    return _AllToAll.apply(plan.channel, plan.sent, plan.received, factor, *own)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def combine(rows: Tensor, plan: Dispatch, factor: float = 1.0) -> Tensor:
    """Send the rows (R, W) that came back to where they came from, and add up those of one row: (T, W).

    Backward: each rank that a row went to gets its gradient, multiplied by ``factor``.
    """
    back: Tensor
    (back,) = _AllToAll.apply(plan.channel, plan.received, plan.sent, factor, rows)  # type: ignore[no-untyped-call]
    return back.new_zeros(plan.total, back.size(1)).index_add(0, plan.rows, back)
