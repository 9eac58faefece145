"""What travels between the replicas of a model: the collectives of FSDP2, and what waits for them."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from shardcore._torch import all_gather_single, reduce_scatter_single
from shardcore.comm.channel import Watch, wait_watched

__all__ = ["DataTransport"]


class DataTransport:
    """The collectives by which FSDP2 gathers parameters and scatters gradients of one model.

    On a CPU, where a host waits in them, they let `watch` look now and then whether the others will come.

    Attributes:
        sent: how many of them this rank has begun, alike on all ranks.
        watch: called about once a second by a rank that waits for the others. None: nothing is.
    """

    watch: Watch | None = None
    looks: ClassVar[datetime.timedelta] = datetime.timedelta(seconds=1)  # between two calls of it

    def __init__(self) -> None:
        self.sent = 0

    def serve(self, module: nn.Module) -> None:
        """Let FSDP2, which has been applied to ``module``, send by this."""
        assert isinstance(module, FSDPModule)
        module.set_custom_all_gather(_AllGather(self))  # type: ignore[arg-type]  # an ABC that torch keeps to itself
        module.set_custom_reduce_scatter(_ReduceScatter(self))  # type: ignore[arg-type]

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # of the same ranks


class _Watched(dist.Work):
    """A collective that is under way, whose `wait` looks whether it will come through."""

    def __init__(self, work: dist.Work, group: ProcessGroup, transport: DataTransport) -> None:
        super().__init__()
        self._work, self.group, self._transport = work, group, transport

    @property
    def watch(self) -> Watch | None:
        return self._transport.watch

    @property
    def looks(self) -> datetime.timedelta:
        return self._transport.looks

    @override
    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Wait until it is done; how long is up to the process group."""
        wait_watched(self._work, self)
        return True


class _Comm:
    """One kind of collective, in the form in which FSDP2 takes it: ``torch.distributed.fsdp``'s ``Comm``."""

    def __init__(self, transport: DataTransport) -> None:
        self._transport = transport

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return room for what is sent or comes."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _send(self, begin: Callable[..., dist.Work], group: ProcessGroup, asynchronous: bool) -> dist.Work | None:
        self._transport.sent += 1
        work = _Watched(begin(group=group, async_op=True), group, self._transport)
        if asynchronous:
            return work
        work.wait()
        return None


class _AllGather(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the parts of parameters."""
        begin = functools.partial(all_gather_single, output_tensor, input_tensor)
        return self._send(begin, group, async_op)


class _ReduceScatter(_Comm):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Sum gradients, and keep this rank's part."""
        begin = functools.partial(reduce_scatter_single, output_tensor, input_tensor, op=op)
        return self._send(begin, group, async_op)
