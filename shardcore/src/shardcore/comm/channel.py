"""What travels between the ranks of one group: the transport under every collective of a forward and a backward.

A `Channel` is a process group and the form that payloads take on it. It has the five collectives that everything else
in `shardcore.comm` is made of. All but `exchange` have two bodies: c10d calls for eager mode, functional collectives
(which `torch.compile` can trace) when compiling.

Tensors on the meta device have nothing to send: of these every collective returns what it would in shape and dtype, and
no other rank takes part. So a sharded model can be called there, to find out what it returns.

Payloads of another form (in fewer bits, say) are a subclass that overrides some of the four, and `exact`; see
`tests/support/own_channel.py`.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from shardcore._torch import all_gather_single, funcol, reduce_scatter_single

__all__ = ["Channel", "Pending", "Watch", "Watched", "wait_watched"]


def _sum_options(*, asynchronous: bool) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = asynchronous
    return options


_SUM = _sum_options(asynchronous=False)
_SUM_ASYNCHRONOUSLY = _sum_options(asynchronous=True)


class Pending:
    """A collective that is under way; eager mode only.

    Args:
        work: what the backend returned; None where it has put the collective on the current stream.
        result: makes the result when the collective is done.
        read: what the collective reads; it lives as long as this.
        channel: whose `Channel.watch` is called by who waits.
    """

    __slots__ = ("_channel", "_read", "_result", "_work")

    def __init__(
        self, work: dist.Work | None, result: Callable[[], Tensor], read: Tensor, channel: Channel | None = None
    ) -> None:
        self._work = work
        self._result = result
        self._read = read
        self._channel = channel

    def wait(self) -> Tensor:
        """Return the result; to be called once."""
        if self._work is not None:
            wait_watched(self._work, self._channel)
        return self._result()


#: Looks, while a rank waits, whether the others will come, and raises if not; or, given what a collective has raised,
#: whether others have ended.
Watch: TypeAlias = Callable[[Exception | None], None]


class Watched(Protocol):
    """The ranks of a group, and what looks whether those that are waited for will come."""

    @property
    def group(self) -> ProcessGroup:
        """The group."""

    @property
    def watch(self) -> Watch | None:
        """What looks; None if nothing does."""

    @property
    def looks(self) -> datetime.timedelta:
        """The time between two looks."""


def wait_watched(work: dist.Work, channel: Watched | None) -> None:
    """Wait until a collective is done, and let the channel's ``watch`` look now and then whether it ever will be."""
    if channel is None or channel.watch is None:
        work.wait()
        return
    while True:
        try:
            work.wait(channel.looks)
        except RuntimeError as error:
            if "Operation timed out" not in str(error):  # what waits of a work say; it goes on
                channel.watch(error)
                raise
        else:
            return
        channel.watch(None)


class Channel:
    """The ranks of one group, and how tensors travel between them.

    Attributes:
        group: the process group.
        rank: this rank's position in it.
        size: the number of its ranks.
        sent: how many collectives this rank has begun, alike on all ranks; those of compiled graphs are not counted.
        watch: called about once a second by a rank that waits for the others, on a CPU. None: nothing is.
    """

    watch: Watch | None = None
    looks: ClassVar[datetime.timedelta] = datetime.timedelta(seconds=1)  # between two calls of it

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.sent = 0

    @property
    def exact(self) -> Channel:
        """The channel between the same ranks for what has to arrive as it was: losses, parameters, their gradients."""
        return self

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over the ranks: in place in eager mode, into a new tensor when compiling."""
        if torch.compiler.is_compiling():
            out: Tensor = funcol.wait_tensor(funcol.all_reduce(x, "sum", self.group))
            return out
        if x.is_meta:
            return x
        # What torch.distributed.all_reduce ends in; its checks cost 13 us each time.
        self.sent += 1
        work = self.group.allreduce([torch.view_as_real(x) if x.is_complex() else x], _SUM)
        if work is not None:  # as in `Pending`
            wait_watched(work, self)
        return x

    def start_all_reduce(self, x: Tensor) -> Pending:
        """Start the sum of ``x`` over the ranks, in place; eager mode only."""
        if x.is_meta:
            return Pending(None, lambda: x, x)
        self.sent += 1
        work = self.group.allreduce([torch.view_as_real(x) if x.is_complex() else x], _SUM_ASYNCHRONOUSLY)
        return Pending(work, lambda: x, x, self)

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what each rank has, alike in shape: (...) to (size, ...)."""
        if torch.compiler.is_compiling():
            out: Tensor = funcol.wait_tensor(funcol.all_gather_tensor(x.contiguous().unsqueeze(0), 0, self.group))
            return out
        return self.start_all_gather(x).wait()

    def start_all_gather(self, x: Tensor) -> Pending:
        """Start `all_gather`; eager mode only."""
        x = x.contiguous()
        flat = x.new_empty(self.size * x.size(0), *x.shape[1:])
        if x.is_meta:
            return Pending(None, lambda: flat.view(self.size, *x.shape), x)
        self.sent += 1
        work = all_gather_single(flat, x, group=self.group, async_op=True)
        return Pending(work, lambda: flat.view(self.size, *x.shape), x, self)

    def reduce_scatter(self, stacked: Tensor) -> Tensor:
        """Sum over the ranks what each has for every rank, and return this rank's: (size, ...) to (...)."""
        if torch.compiler.is_compiling():
            out: Tensor = funcol.wait_tensor(funcol.reduce_scatter_tensor(stacked.contiguous(), "sum", 0, self.group))
            return out.squeeze(0)
        return self.start_reduce_scatter(stacked).wait()

    def start_reduce_scatter(self, stacked: Tensor) -> Pending:
        """Start `reduce_scatter`; eager mode only."""
        stacked = stacked.contiguous()
        if stacked.is_meta:
            return Pending(None, lambda: stacked.sum(0), stacked)
        self.sent += 1
        if stacked.device.type == "cpu":
            # gloo's own reduce-scatter takes ten times as long as sending every rank its summands.
            summands = torch.empty_like(stacked)
            work = dist.all_to_all_single(summands, stacked, group=self.group, async_op=True)
            return Pending(work, lambda: summands.sum(0), stacked, self)
        out = stacked.new_empty(stacked.shape[1:])
        work = reduce_scatter_single(out, stacked, group=self.group, async_op=True)
        return Pending(work, lambda: out, stacked)

    def exchange(self, flat: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its piece of ``flat``, and return what came, (sum(received)); eager mode only.

        Args:
            flat: the pieces one after the other, by the rank that they go to.
            sent: the size of each.
            received: how much comes from each rank.
        """
        out = flat.new_empty(sum(received))
        if flat.is_meta:
            return out
        self.sent += 1
        work = dist.all_to_all_single(out, flat, list(received), list(sent), group=self.group, async_op=True)
        wait_watched(work, self)
        return out

    def all_reduce_max(self, x: Tensor) -> Tensor:
        """Return the largest of all ranks' values, element by element; in place in eager mode."""
        if torch.compiler.is_compiling():
            out: Tensor = funcol.wait_tensor(funcol.all_reduce(x, "max", self.group))
            return out
        if not x.is_meta:
            self.sent += 1
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of the same ranks
