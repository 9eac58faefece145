"""Rows of parameters that ranks hold in equal parts and use in other ones, such as whole heads.

A rank holds the r-th part of a parameter along one dim, cut as `torch.chunk` cuts; that is a placement which DTensor,
FSDP2 and checkpoints know. What it uses may be any rows: those of its heads in a weight [q|k|v], a KV head that other
ranks use too, or some rows several times.

Forward: one all-to-all brings every rank the rows that it uses and does not hold. Backward: the opposite one brings
their gradients back to where the rows are held, and sums them. Both carry several parameters as one buffer for each
dtype; rows that stay on their rank are not sent.

Shapes: n is the number of rows that a rank holds, m that of those it uses; (n, ...) is a part, (m, ...) what is used.
"Rows" are slices along the dim of the `Exchange`.

Rows that neighbouring ranks hold in parts and use together, as they do a KV head that they share, are gathered: one
all-gather puts the parts of all given parameters together, one reduce-scatter sums what the ranks have of their
gradients. There n is the number of rows of one rank's part, c that of the neighbours; (c*n, ...) is what is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.collectives import Channel, chunk_bounds, refuse_double_backward
from shardcore.comm.dtensor_params import by_dtype, expect_dtensor, local_tensor, read_local, spec_of, with_spec
from shardcore.comm.gradients import SPLIT, Flow, GradPlacement
from shardcore.comm.strided import Runs


class _Piece(NamedTuple):
    """Consecutive rows that a rank uses, of which one rank holds all."""

    source: int
    start: int  # in the part of the source
    stop: int


def _pieces(runs: Runs, size: int, ranks: int) -> Iterator[_Piece]:
    """Yield the pieces of the rows ``runs`` of a parameter with ``size`` rows, in their order."""
    step = -(-size // ranks)
    for start, stop in runs:
        for source in range(start // step, -(-stop // step)):
            first, end = chunk_bounds(size, ranks, source)
            yield _Piece(source, max(start, first) - first, min(stop, end) - first)


class Exchange:
    """Which rows of a parameter this rank sends to each other rank, and where those that it uses come from.

    ``used`` are the rows that each rank uses, of the ``size`` rows of the whole parameter along ``dim``.
    """

    def __init__(self, used: Sequence[Runs], size: int, rank: int, dim: int = 0) -> None:
        self.dim, self.rank, self.ranks = dim, rank, len(used)
        #: The rows of the whole parameter that this rank uses.
        self.used = used[rank]
        self.pieces = tuple(_pieces(used[rank], size, self.ranks))
        #: By the rank that they go to; none to itself.
        self.sent: tuple[Runs, ...] = tuple(
            tuple((p.start, p.stop) for p in _pieces(runs, size, self.ranks) if p.source == rank and to != rank)
            for to, runs in enumerate(used)
        )

    def rows_from(self, source: int) -> int:
        """Return how many rows come from another rank."""
        return sum(p.stop - p.start for p in self.pieces if p.source == source != self.rank)


class Exchanged(Function):
    """All-to-all of pieces of the given sizes; the backward sends them back."""

    flow = SPLIT

    @staticmethod
    def forward(ctx: Any, flat: Tensor, channel: Channel, sent: list[int], received: list[int]) -> Tensor:
        """Return what came."""
        ctx.channel, ctx.sent, ctx.received = channel, sent, received
        return channel.exchange(flat, sent, received)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the gradients back."""
        refuse_double_backward()
        return ctx.channel.exchange(grads[0].contiguous(), ctx.received, ctx.sent), None, None, None


# The graphs of the ranks would differ by what each sends, and a compiler orders the collectives of a graph as it likes.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _exchange_untraced(channel: Channel, exchanges: Sequence[Exchange], parameters: Sequence[Tensor]) -> list[Tensor]:
    return exchange_rows(channel, exchanges, parameters)


def exchange_rows(channel: Channel, exchanges: Sequence[Exchange], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Return the rows of ``parameters`` that this rank uses, as plain tensors (m, ...).

    They are DTensors split over the ranks (n, ...), each along the dim of its exchange.
    """
    if torch.compiler.is_compiling():
        return _exchange_untraced(channel, exchanges, parameters)  # type: ignore[no-any-return]  # breaks the graph
    for parameter in parameters:
        expect_dtensor(parameter)
    parts = read_local(*parameters)
    used = list(parts)
    for places in by_dtype(parts):
        found = _exchanged(channel.exact, [exchanges[i] for i in places], [parts[i] for i in places])
        for i, tensor in zip(places, found, strict=True):
            used[i] = tensor
    return used


def _exchanged(channel: Channel, exchanges: Sequence[Exchange], parts: Sequence[Tensor]) -> list[Tensor]:
    """Do what `exchange_rows` does, for parts of one dtype."""
    pairs = list(zip(exchanges, parts, strict=True))
    widths = [part.numel() // max(1, part.size(e.dim)) for e, part in pairs]  # numbers in one row
    going = [[part.narrow(e.dim, a, b - a) for e, part in pairs for a, b in e.sent[to]] for to in range(channel.size)]
    sent = [sum(piece.numel() for piece in pieces) for pieces in going]
    received = [
        sum(e.rows_from(source) * width for (e, _), width in zip(pairs, widths, strict=True))
        for source in range(channel.size)
    ]
    # The empty slices tie each rank's graph to the collective, whether or not the rank sends or gets anything: it
    # takes part in the backward like all others.
    ties = [part.reshape(-1)[:0] for part in parts]
    flat = torch.cat([*ties, *(piece.reshape(-1) for pieces in going for piece in pieces)])
    came: Tensor = Exchanged.apply(flat, channel, sent, received)  # type: ignore[no-untyped-call]  # untyped in torch
    at = [sum(received[:source]) for source in range(channel.size)]
    out = []
    for (e, part), width in zip(pairs, widths, strict=True):
        shape = list(part.shape)
        shape[e.dim] = 0
        pieces = [came[:0].view(shape)]
        for source, start, stop in e.pieces:
            if source == e.rank:
                pieces.append(part.narrow(e.dim, start, stop - start))
                continue
            shape[e.dim] = stop - start
            pieces.append(came.narrow(0, at[source], (stop - start) * width).view(shape))
            at[source] += (stop - start) * width
        out.append(torch.cat(pieces, e.dim))
    return out


def misused(used: tuple[Runs, ...] | None, name: str, size: int, ranks: int) -> str | None:
    """Say what is wrong with the rows or columns that each rank is to use, or return None."""
    if used is None:
        return None
    if len(used) != ranks:
        return f"used= says what {len(used)} ranks use, of {ranks}"
    if any(not runs or not all(0 <= start < stop <= size for start, stop in runs) for runs in used):
        return f"used={used}: every rank needs runs of at least one of the {size} {name}"
    return None


def _put_together(parts: Sequence[Tensor], channel: Channel) -> tuple[Tensor, ...]:
    """Return the rows of the whole group: each (n, ...) to (c*n, ...)."""
    ranks, together = channel.size, list(parts)
    for places in by_dtype(parts):
        flat = torch.cat([parts[i].reshape(-1) for i in places])
        if torch.compiler.is_compiling():
            stacked = _CompiledGatherRows.apply(flat, channel)  # type: ignore[no-untyped-call]  # untyped in torch
        else:
            stacked = channel.all_gather(flat)
        for i, piece in zip(places, stacked.split([parts[i].numel() for i in places], 1), strict=True):
            together[i] = piece.reshape(ranks * parts[i].size(0), *parts[i].shape[1:])
    return tuple(together)


class _CompiledGatherRows(Function):
    """What each rank has: (m) to (c, m)."""

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
        for places in by_dtype(trained):
            parts = [local_tensor(parameters[i]) for i in places]
            # What belongs to each rank's part (n, ...) of a gradient (c*n, ...): (c, m).
            summands = [
                part.new_zeros(channel.size, part.numel()) if (g := grads[i]) is None else g.reshape(channel.size, -1)
                for i, part in zip(places, parts, strict=True)
            ]
            own = channel.reduce_scatter(torch.cat(summands, 1)).split([part.numel() for part in parts])
            for i, part, piece in zip(places, parts, own, strict=True):
                if grads[i] is not None:
                    out[i] = with_spec(piece.view(part.shape), spec_of(parameters[i]))
        return None, *out


def gather_rows(channel: Channel, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return the rows of ``parameters`` that the ranks of ``channel`` hold together, as plain tensors (c*n, ...).

    The ranks are neighbours on ``tp``, in the order of their parts. The parameters are DTensors split on dim 0 over all
    tensor-parallel ranks into equal parts (n, ...).
    """
    for parameter in parameters:
        expect_dtensor(parameter)
    if torch.compiler.is_compiling():
        return _put_together(read_local(*parameters), channel)
    if not torch.is_grad_enabled():
        return _put_together([local_tensor(p) for p in parameters], channel)
    return _GatherRows.apply(channel, *parameters)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch
