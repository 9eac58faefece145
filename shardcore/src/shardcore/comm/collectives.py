"""Collectives on activations, each with the collective that its gradient needs.

The pairs are those of Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3): *f* enters a
region in which activations are split over the tensor-parallel ranks, *g* leaves it.

Shapes: H is a full dim, H/tp one rank's part of it; uneven parts follow `torch.chunk` (the last ones are smaller).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from shardcore.comm.channel import Channel
from shardcore.comm.flow import ENTERS, LEAVES
from shardcore.errors import NotSupportedError

__all__ = [
    "chunk_bounds",
    "copy_to_tp",
    "gather_from_tp",
    "packed",
    "reduce_from_tp",
    "refuse_double_backward",
    "split_to_tp",
]


def refuse_double_backward() -> None:
    """Raise if a backward is being recorded (``create_graph=True``): collectives in it could not be differentiated.

    Raises:
        NotSupportedError: grad mode is on inside a backward.
    """
    if torch.is_grad_enabled():
        raise NotSupportedError(
            "backward with create_graph=True through a tensor-parallel module: second derivatives are not supported. "
            "Compute them on the unsharded model, or with tensor_parallel_size=1."
        )


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Return the first and one-past-last index of part ``index`` when ``size`` is cut as `torch.chunk` cuts it."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


def packed(x: Tensor) -> Tensor:
    """Return ``x`` in contiguous memory, for what a `Function` returns from its forward.

    Not ``x.contiguous()``: where that has nothing to do, torch 2.11 compiles a graph in which the gradient is lost.
    """
    return x if x.is_contiguous() else x.contiguous()


def _all_gather(x: Tensor, channel: Channel, dim: int, sizes: Sequence[int]) -> Tensor:
    """Put the parts of ``x`` along ``dim`` together again; ``sizes`` are those of the ranks.

    Parts are padded to the largest one for the transfer, so that uneven parts need a single collective.
    """
    step = max(sizes)
    if x.size(dim) < step:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], step - x.size(dim), *x.shape[dim + 1 :])], dim)
    stacked = channel.all_gather(x)
    parts = [part.narrow(dim, 0, size) for size, part in zip(sizes, stacked.unbind(0), strict=True)]
    return torch.cat(parts, dim)


def _sizes(size: int, parts: int) -> list[int]:
    bounds = [chunk_bounds(size, parts, index) for index in range(parts)]
    return [stop - start for start, stop in bounds]


class _CopyToTP(Function):
    flow = ENTERS

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_double_backward()
        # The incoming gradient may be shared with another branch of the graph: it must not be reduced in place.
        return ctx.channel.of_gradients.all_reduce(grads[0].clone(memory_format=torch.contiguous_format)), None


class _ReduceFromTP(Function):
    flow = LEAVES

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, channel: Channel) -> Tensor:
        return channel.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ReduceFromTPInPlace(Function):
    flow = LEAVES

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, channel: Channel) -> Tensor:
        ctx.mark_dirty(x)
        return channel.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherFromTP(Function):
    flow = LEAVES

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, dim: int, sizes: Sequence[int]) -> Tensor:
        ctx.channel, ctx.dim, ctx.sizes = channel, dim, sizes
        return _all_gather(x, channel, dim, sizes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        start, own = sum(ctx.sizes[: ctx.channel.rank]), ctx.sizes[ctx.channel.rank]
        return grads[0].narrow(ctx.dim, start, own).contiguous(), None, None, None


class _SplitToTP(Function):
    flow = ENTERS

    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, dim: int) -> Tensor:
        ctx.channel, ctx.dim, ctx.size = channel, dim, x.size(dim)
        start, stop = chunk_bounds(x.size(dim), channel.size, channel.rank)
        return packed(x.narrow(dim, start, stop - start))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        refuse_double_backward()
        return _all_gather(grads[0], ctx.channel, ctx.dim, _sizes(ctx.size, ctx.channel.size)), None, None


def copy_to_tp(x: Tensor, channel: Channel) -> Tensor:
    """Enter a region: identity forward, all-reduce backward (Megatron's *f*). Shape (..., H) in and out."""
    out: Tensor = _CopyToTP.apply(x, channel)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def reduce_from_tp(x: Tensor, channel: Channel, *, fresh: bool = False) -> Tensor:
    """Leave a region: all-reduce forward, identity backward (Megatron's *g*). Shape (..., H) in and out.

    Args:
        x: this rank's summand.
        channel: of the tensor-parallel ranks.
        fresh: nobody else holds ``x`` and no gradient formula reads it, so that it may be reduced in place.
    """
    in_place = fresh and not torch.compiler.is_compiling()
    out: Tensor = (_ReduceFromTPInPlace if in_place else _ReduceFromTP).apply(x, channel)  # type: ignore[no-untyped-call]
    return out


def gather_from_tp(x: Tensor, channel: Channel, dim: int, size: int | Sequence[int]) -> Tensor:
    """All-gather forward, own part backward: (..., H/tp, ...) to (..., H, ...) along ``dim``.

    ``size`` is its full extent, or the extents of the ranks' parts where these are not cut as `torch.chunk` cuts. The
    backward holds if what follows is the same on all ranks, as it is outside regions.
    """
    sizes = _sizes(size, channel.size) if isinstance(size, int) else size
    out: Tensor = _GatherFromTP.apply(x, channel, dim % x.ndim, sizes)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def split_to_tp(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """Own part forward, all-gather backward: (..., H, ...) to (..., H/tp, ...) along ``dim``."""
    out: Tensor = _SplitToTP.apply(x, channel, dim % x.ndim)  # type: ignore[no-untyped-call]  # untyped in torch
    return out
