"""Rows of parameters that neighbouring ranks hold in parts and use together, as they do a KV head that they share.

Forward: one all-gather puts the parts of all given parameters together. Backward: one reduce-scatter sums what the
ranks of the group have of their gradients, and leaves each rank its own part. Both carry several parameters as one
buffer for each dtype.

Shapes: n is the number of rows of one rank's part, c the number of neighbours; (n, ...) is a part, (c*n, ...) the rows
that are used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.channel import Channel
from shardcore.comm.collectives import refuse_double_backward
from shardcore.comm.dtensor_params import expect_dtensor, local_tensor, read_local, spec_of, with_spec
from shardcore.comm.flow import Flow, GradPlacement

__all__ = ["gather_rows"]


def _by_dtype(tensors: Sequence[Tensor | None]) -> Iterator[list[int]]:
    """Yield the places of the tensors of each dtype, in the order of the first of each."""
    for dtype in dict.fromkeys(t.dtype for t in tensors if t is not None):
        yield [i for i, t in enumerate(tensors) if t is not None and t.dtype == dtype]


def _put_together(parts: Sequence[Tensor], channel: Channel) -> tuple[Tensor, ...]:
    """Return the rows of the whole group: each (n, ...) to (c*n, ...)."""
    ranks, together = channel.size, list(parts)
    for places in _by_dtype(parts):
        flat = torch.cat([parts[i].reshape(-1) for i in places])
        stacked = _all_gather(flat, channel)
        for i, piece in zip(places, stacked.split([parts[i].numel() for i in places], 1), strict=True):
            together[i] = piece.reshape(ranks * parts[i].size(0), *parts[i].shape[1:])
    return tuple(together)


def _all_gather(flat: Tensor, channel: Channel) -> Tensor:
    """Return what each rank of ``channel`` has: (m) to (c, m)."""
    if torch.compiler.is_compiling():
        out: Tensor = _CompiledGatherRows.apply(flat, channel)  # type: ignore[no-untyped-call]  # untyped in torch
        return out
    return channel.all_gather(flat)


class _CompiledGatherRows(Function):
    @staticmethod
    def forward(ctx: Any, flat: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return channel.all_gather(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        refuse_double_backward()
        return ctx.channel.reduce_scatter(grads[0]), None


class _GatherRows(Function):
    flow = Flow(GradPlacement.VARYING, GradPlacement.VARYING, one_to_one=True)

    @staticmethod
    def forward(ctx: Any, channel: Channel, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.channel, ctx.parameters = channel, parameters
        return _put_together([local_tensor(p).detach() for p in parameters], channel)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        channel, parameters = ctx.channel, ctx.parameters
        out: list[Tensor | None] = [None] * len(parameters)
        # What is sent follows from which parameters are trained, not from which of them got a gradient here.
        trained = [p if needed else None for p, needed in zip(parameters, ctx.needs_input_grad[1:], strict=True)]
        for places in _by_dtype(trained):
            parts = [local_tensor(parameters[i]) for i in places]
            summands = [_rows_of_ranks(grads[i], part, channel.size) for i, part in zip(places, parts, strict=True)]
            own = channel.reduce_scatter(torch.cat(summands, 1)).split([part.numel() for part in parts])
            for i, part, piece in zip(places, parts, own, strict=True):
                if grads[i] is not None:
                    out[i] = with_spec(piece.view(part.shape), spec_of(parameters[i]))
        return None, *out


def _rows_of_ranks(grad: Tensor | None, part: Tensor, ranks: int) -> Tensor:
    """Return a gradient (c*n, ...) as what belongs to each rank's part (n, ...): (c, m), or zeros for None."""
    return part.new_zeros(ranks, part.numel()) if grad is None else grad.reshape(ranks, -1)


def gather_rows(channel: Channel, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of ``parameters`` that the ranks of ``channel`` hold together, as plain tensors.

    Args:
        channel: neighbouring tensor-parallel ranks, in the order of their parts.
        *parameters: DTensors split on dim 0 over all tensor-parallel ranks into equal parts (n, ...).

    Returns:
        For each parameter (c*n, ...), the same on all ranks of ``channel``.

    Raises:
        WrapError: one of them is a plain tensor: somebody put it in the DTensor's place.
    """
    for parameter in parameters:
        expect_dtensor(parameter)
    if torch.compiler.is_compiling():
        return _put_together(read_local(*parameters), channel)
    if not torch.is_grad_enabled():
        return _put_together([local_tensor(p) for p in parameters], channel)
    out: tuple[Tensor, ...] = _GatherRows.apply(channel, *parameters)  # type: ignore[no-untyped-call]  # untyped in torch
    return out
