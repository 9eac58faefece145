"""What travels between the ranks of one group, and the collectives that gradients of collectives need.

A `Channel` is a process group and the form that payloads take on it. It has the five collectives that everything else
in `shardcore.comm` is made of. All but `exchange` have two bodies: c10d calls for eager mode, functional collectives
(which `torch.compile` can trace) when compiling.

Tensors on the meta device have nothing to send: of these every collective returns what it would in shape and dtype, and
no other rank takes part. So a sharded model can be called there, to find out what it returns.

Payloads of another form are a subclass that overrides some of the four, `exact` and `of_gradients`, as
`shardcore.transfer.fp8` does.

The pairs of a forward and a backward are those of Megatron-LM (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053,
section 3): *f* enters a region in which activations are split over the tensor-parallel ranks, *g* leaves it. Shapes: H
is a full dim, H/tp one rank's part of it; uneven parts follow `torch.chunk` (the last ones are smaller).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.distributed import ProcessGroup

from shardcore._torch import all_gather_single, funcol, reduce_scatter_single
from shardcore.comm.gradients import ENTERS, LEAVES
from shardcore.errors import NotSupportedError

# Options are of a sum that does not hold up the current stream, if nothing else is said.
_SUM, _SUM_ASYNCHRONOUSLY = dist.AllreduceOptions(), dist.AllreduceOptions()
_SUM.asyncOp = False


class Pending:
    """A collective that is under way.

    Args:
        work: what the backend returned; None where it has put the collective on the current stream.
        result: makes the result when the collective is done.
        read: what the collective reads; it lives as long as this.
    """

    __slots__ = ("_read", "_result", "_work")

    def __init__(self, work: dist.Work | None, result: Callable[[], Tensor], read: Tensor) -> None:
        self._work = work
        self._result = result
        self._read = read

    def wait(self) -> Tensor:
        """Return the result; to be called once."""
        if self._work is not None:
            self._work.wait()
        return self._result()


class Channel:
    """The ``size`` ranks of one group, and how tensors travel between them; ``rank`` is this one's position."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    @property
    def exact(self) -> Channel:
        """The channel between the same ranks for what has to arrive as it was: losses, parameters, their gradients."""
        return self

    @property
    def of_gradients(self) -> Channel:
        """The channel between the same ranks for gradients of activations, which may travel in another form."""
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks: in place in eager mode, into a new tensor when compiling."""
        if torch.compiler.is_compiling():
            out: Tensor = funcol.all_reduce(x, "sum", self.group)
            return out
        if x.is_meta:
            return x
        # What torch.distributed.all_reduce ends in; its checks cost 13 us each time.
        work = self.group.allreduce([torch.view_as_real(x) if x.is_complex() else x], _SUM)
        if work is not None:  # as in `Pending`
            work.wait()
        return x

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Start the sum of ``x`` over the ranks, in place; eager mode only."""
        if x.is_meta:
            return Pending(None, lambda: x, x)
        work = self.group.allreduce([torch.view_as_real(x) if x.is_complex() else x], _SUM_ASYNCHRONOUSLY)
        return Pending(work, lambda: x, x)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what each rank has, alike in shape: (...) to (size, ...)."""
        return self.start_all_gather(x).wait()

    def start_all_gather(self, x: Tensor) -> Pending:
        """Start `all_gather`."""
        x = x.contiguous()
        if torch.compiler.is_compiling():
            out: Tensor = funcol.all_gather_tensor(x.unsqueeze(0), 0, self.group)
            return Pending(None, lambda: out, x)
        flat = x.new_empty(self.size * x.size(0), *x.shape[1:])
        if x.is_meta:
            return Pending(None, lambda: flat.view(self.size, *x.shape), x)
        work = all_gather_single(flat, x, group=self.group, async_op=True)
        return Pending(work, lambda: flat.view(self.size, *x.shape), x)

    def reduce_scatter(self, stacked: Tensor) -> Tensor:
        """Sum over the ranks what each has for every rank, and return this rank's: (size, ...) to (...)."""
        return self.start_reduce_scatter(stacked).wait()

    def start_reduce_scatter(self, stacked: Tensor) -> Pending:
        """Start `reduce_scatter`."""
        stacked = stacked.contiguous()
        if torch.compiler.is_compiling():
            part: Tensor = funcol.reduce_scatter_tensor(stacked, "sum", 0, self.group)
            return Pending(None, lambda: part.squeeze(0), stacked)
        if stacked.is_meta:
            return Pending(None, lambda: stacked.sum(0), stacked)
        if stacked.device.type == "cpu":
            # gloo's own reduce-scatter takes ten times as long as sending every rank its summands.
            summands = torch.empty_like(stacked)
            work = dist.all_to_all_single(summands, stacked, group=self.group, async_op=True)
            return Pending(work, lambda: summands.sum(0), stacked)
        out = stacked.new_empty(stacked.shape[1:])
        work = reduce_scatter_single(out, stacked, group=self.group, async_op=True)
        return Pending(work, lambda: out, stacked)

    def exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its piece of ``flat``, and return what came, (sum(received)); eager mode only.

        ``sent`` are the sizes of the pieces, by the rank that they go to; ``received`` of those that come.
        """
        out = flat.new_empty(sum(received))
        if flat.is_meta:
            return out
        work = dist.all_to_all_single(out, flat, list(received), list(sent), group=self.group, async_op=True)
        work.wait()
        return out

    def start_shift(self, x: Tensor) -> Pending:
        """Start to send ``x`` to the next rank, the first being that of the last; gives what the one before sends.

        All ranks send alike in shape; eager mode only.
        """
        x = x.contiguous()
        out = torch.empty_like(x)
        if x.is_meta:
            return Pending(None, lambda: out, x)
        ranks = dist.get_process_group_ranks(self.group)
        after, before = ranks[(self.rank + 1) % self.size], ranks[self.rank - 1]
        operations = [dist.P2POp(dist.isend, x, after, self.group), dist.P2POp(dist.irecv, out, before, self.group)]
        works = dist.batch_isend_irecv(operations)

        def arrived() -> Tensor:
            for work in works:
                work.wait()
            return out

        return Pending(None, arrived, x)

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the largest of all ranks' values, element by element; in place in eager mode."""
        if torch.compiler.is_compiling():
            out: Tensor = funcol.all_reduce(x, "max", self.group)
            return out
        if not x.is_meta:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of the same ranks


def refuse_double_backward() -> None:
    """Raise if a backward is being recorded (``create_graph=True``): collectives in it could not be differentiated."""
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


class _ReduceFromTPInPlace(_ReduceFromTP):
    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, channel: Channel) -> Tensor:
        ctx.mark_dirty(x)
        return channel.all_reduce(x)


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
    return _CopyToTP.apply(x, channel)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def reduce_from_tp(x: Tensor, channel: Channel, *, fresh: bool = False) -> Tensor:
    """Leave a region: all-reduce forward, identity backward (Megatron's *g*). Shape (..., H) in and out.

    ``fresh``: nobody else holds ``x`` and no gradient formula reads it, so that it may be reduced in place.
    """
    in_place = fresh and not torch.compiler.is_compiling()
    return (_ReduceFromTPInPlace if in_place else _ReduceFromTP).apply(x, channel)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def gather_from_tp(x: Tensor, channel: Channel, dim: int, size: int | Sequence[int]) -> Tensor:
    """All-gather forward, own part backward: (..., H/tp, ...) to (..., H, ...) along ``dim``.

    ``size`` is its full extent, or the extents of the ranks' parts where these are not cut as `torch.chunk` cuts. The
    backward holds if what follows is the same on all ranks, as it is outside regions.
    """
    sizes = _sizes(size, channel.size) if isinstance(size, int) else size
    return _GatherFromTP.apply(x, channel, dim % x.ndim, sizes)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def split_to_tp(x: Tensor, channel: Channel, dim: int) -> Tensor:
    """Own part forward, all-gather backward: (..., H, ...) to (..., H/tp, ...) along ``dim``."""
    return _SplitToTP.apply(x, channel, dim % x.ndim)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch
