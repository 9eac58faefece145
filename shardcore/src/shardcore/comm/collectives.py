"""Collectives on activations, each with the collective that its gradient needs.

The pairs are those of Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, section 3): *f* enters a
region in which activations are split over the tensor-parallel ranks, *g* leaves it. Every function has two bodies:
c10d calls for eager mode, functional collectives (which `torch.compile` can trace) when compiling.

Shapes: H is a full dim, H/tp one rank's part of it; uneven parts follow `torch.chunk` (the last ones are smaller).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from shardcore._torch import all_gather_single, funcol
from shardcore.errors import NotSupportedError

__all__ = [
    "all_gather_single",
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


def _sum_options(*, asynchronous: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = asynchronous
    return options


_SUM = _sum_options(asynchronous=False)
_SUM_ASYNCHRONOUSLY = _sum_options(asynchronous=True)


def start_all_reduce(x: Tensor, group: ProcessGroup) -> dist.Work:
    """Start the sum of ``x`` over ``group``, in place; eager mode only.

    This and `all_reduce` make the call that `torch.distributed.all_reduce` ends in: its checks cost 13 us each time.
    """
    return group.allreduce([torch.view_as_real(x) if x.is_complex() else x], _SUM_ASYNCHRONOUSLY)


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum ``x`` over ``group``: in place in eager mode, into a new tensor when compiling."""
    if torch.compiler.is_compiling():
        out: Tensor = funcol.wait_tensor(funcol.all_reduce(x, "sum", group))
        return out
    work = group.allreduce([torch.view_as_real(x) if x.is_complex() else x], _SUM)
    if work is not None:  # None where the backend has put the sum on the current stream
        work.wait()
    return x


def all_reduce_max(x: Tensor, group: ProcessGroup) -> Tensor:
    """Return the largest of all ranks' values, element by element; in place in eager mode."""
    if torch.compiler.is_compiling():
        out: Tensor = funcol.wait_tensor(funcol.all_reduce(x, "max", group))
        return out
    dist.all_reduce(x, dist.ReduceOp.MAX, group=group)
    return x


def all_gather(x: Tensor, group: ProcessGroup, dim: int, size: int) -> Tensor:
    """Put the parts of ``x`` along ``dim`` together again; ``size`` is the full extent of that dim.

    Parts are padded to the largest one for the transfer, so that uneven parts need a single collective.
    """
    world = dist.get_world_size(group)
    dim = dim % x.ndim
    step = -(-size // world)
    if x.size(dim) < step:
        x = torch.cat([x, x.new_zeros(*x.shape[:dim], step - x.size(dim), *x.shape[dim + 1 :])], dim)
    x = x.contiguous()
    if torch.compiler.is_compiling():
        stacked = funcol.wait_tensor(funcol.all_gather_tensor(x.unsqueeze(0), 0, group))
    else:
        flat = x.new_empty(world * x.size(0), *x.shape[1:])
        all_gather_single(flat, x, group=group)
        stacked = flat.view(world, *x.shape)
    parts = [part.narrow(dim, 0, _length(size, world, rank)) for rank, part in enumerate(stacked.unbind(0))]
    return torch.cat(parts, dim)


def _length(size: int, parts: int, index: int) -> int:
    start, stop = chunk_bounds(size, parts, index)
    return stop - start


class _CopyToTP(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_double_backward()
        # The incoming gradient may be shared with another branch of the graph: it must not be reduced in place.
        return all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _ReduceFromTP(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        return all_reduce(x.clone(memory_format=torch.contiguous_format), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _ReduceFromTPInPlace(Function):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _GatherFromTP(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int, size: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, size
        return all_gather(x, group, dim, size)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        start, stop = chunk_bounds(ctx.size, dist.get_world_size(ctx.group), dist.get_rank(ctx.group))
        return grads[0].narrow(ctx.dim, start, stop - start).contiguous(), None, None, None


class _SplitToTP(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, x.size(dim)
        start, stop = chunk_bounds(x.size(dim), dist.get_world_size(group), dist.get_rank(group))
        return packed(x.narrow(dim, start, stop - start))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        refuse_double_backward()
        return all_gather(grads[0], ctx.group, ctx.dim, ctx.size), None, None


def _apply(function: type[Function], *args: Any) -> Tensor:
    out: Tensor = function.apply(*args)
    return out


def copy_to_tp(x: Tensor, group: ProcessGroup) -> Tensor:
    """Enter a region: identity forward, all-reduce backward (Megatron's *f*). Shape (..., H) in and out."""
    return _apply(_CopyToTP, x, group)


def reduce_from_tp(x: Tensor, group: ProcessGroup, *, fresh: bool = False) -> Tensor:
    """Leave a region: all-reduce forward, identity backward (Megatron's *g*). Shape (..., H) in and out.

    Args:
        x: this rank's summand.
        group: the tensor-parallel ranks.
        fresh: nobody else holds ``x`` and no gradient formula reads it, so that it may be reduced in place.
    """
    if fresh and not torch.compiler.is_compiling():
        return _apply(_ReduceFromTPInPlace, x, group)
    return _apply(_ReduceFromTP, x, group)


def gather_from_tp(x: Tensor, group: ProcessGroup, dim: int, size: int) -> Tensor:
    """All-gather forward, own part backward: (..., H/tp, ...) to (..., H, ...) along ``dim`` of full extent ``size``.

    The backward holds if what follows is the same on all ranks, as it is outside regions.
    """
    return _apply(_GatherFromTP, x, group, dim % x.ndim, size)


def split_to_tp(x: Tensor, group: ProcessGroup, dim: int) -> Tensor:
    """Own part forward, all-gather backward: (..., H, ...) to (..., H/tp, ...) along ``dim``."""
    return _apply(_SplitToTP, x, group, dim % x.ndim)
