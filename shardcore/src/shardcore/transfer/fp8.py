"""Activations and their gradients in 8 bits between tensor-parallel ranks: half the bytes of bfloat16, and rounding.

Each part that travels has a scale of its own, the largest of its absolute values over the largest of the format: 4 bits
of exponent and 3 of mantissa (e4m3) for activations, 5 and 2 (e5m2), of a wider range, for gradients (Micikevicius et
al. 2022, https://arxiv.org/abs/2209.05433). A sum is an exchange of parts, a sum in float32, and a gather of the sums:
every number is rounded twice, and all ranks end with the same bits. After ColossalAI's ``fp8_communication``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from shardcore._torch import funcol
from shardcore.comm.collectives import Channel, Pending

_SCALE = 4  # bytes in front of a part


class Fp8Channel(Channel):
    """Sends floating-point numbers in 8 bits, as ``form``; everything else, and what `exact` sends, as it is."""

    def __init__(self, group: ProcessGroup, form: torch.dtype = torch.float8_e4m3fn) -> None:
        super().__init__(group)
        self._exact, self._form = Channel(group), form
        self._of_gradients = Fp8Channel(group, torch.float8_e5m2) if form is not torch.float8_e5m2 else self

    @property
    @override
    def exact(self) -> Channel:
        return self._exact

    @property
    @override
    def of_gradients(self) -> Channel:
        return self._of_gradients

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        if _stays(x):
            return self._exact.all_reduce(x)
        total = self._sum(x)()
        return total if torch.compiler.is_compiling() else x.copy_(total)

    @override
    def start_all_reduce(self, x: Tensor) -> Pending:
        if _stays(x):
            return self._exact.start_all_reduce(x)
        total = self._sum(x)
        return Pending(None, lambda: x.copy_(total()), x)

    @override
    def start_all_gather(self, x: Tensor) -> Pending:
        if _stays(x):
            return self._exact.start_all_gather(x)
        pending = self._exact.start_all_gather(pack(x.reshape(1, -1), self._form))
        return Pending(None, lambda: unpack(pending.wait().flatten(0, 1), self._form, x), x)

    @override
    def start_reduce_scatter(self, stacked: Tensor) -> Pending:
        if _stays(stacked):
            return self._exact.start_reduce_scatter(stacked)
        arrived, part = self._exchanged(pack(stacked.reshape(self.size, -1), self._form)), stacked[0]
        return Pending(None, lambda: unpack(arrived(), self._form, part, torch.float32).sum(0).to(part), part)

    def _sum(self, x: Tensor) -> Callable[[], Tensor]:
        """Start the sum of ``x`` over the ranks; the call returns it, in the dtype of ``x``."""
        step = -(-x.numel() // self.size)
        flat = torch.cat([x.reshape(-1), x.new_zeros(self.size * step - x.numel())])
        arrived = self._exchanged(pack(flat.view(self.size, step), self._form))

        def finish() -> Tensor:
            own = unpack(arrived(), self._form, flat[:step], torch.float32).sum(0, keepdim=True)
            sums = self._exact.all_gather(pack(own, self._form)).flatten(0, 1)
            return unpack(sums, self._form, flat[:step]).flatten()[: x.numel()].view(x.shape)

        return finish

    def _exchanged(self, rows: Tensor) -> Callable[[], Tensor]:
        """Start to send each rank its row, (size, bytes); the call returns what came from each."""
        if torch.compiler.is_compiling():
            out: Tensor = funcol.all_to_all_single(rows, None, None, self.group)
            return lambda: out
        received = torch.empty_like(rows)
        work = dist.all_to_all_single(received, rows, group=self.group, async_op=True)
        return Pending(work, lambda: received, rows).wait


def _stays(x: Tensor) -> bool:
    return x.is_meta or not x.is_floating_point()


def pack(parts: Tensor, form: torch.dtype) -> Tensor:
    """Return each row in 8 bits behind its scale: (parts, n) to bytes (parts, 4 + n).

    A row that has a number which is none, or infinite, is none in all of its places.
    """
    scale = parts.abs().amax(1, keepdim=True).float() / torch.finfo(form).max
    scale = torch.where(scale == 0, 1.0, scale)
    return torch.cat([scale.view(torch.uint8), (parts.float() / scale).to(form).view(torch.uint8)], 1)


def unpack(rows: Tensor, form: torch.dtype, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the numbers of `pack`: bytes (parts, 4 + n) to (parts, *shape), with shape and dtype of ``like``."""
    scale = rows[:, :_SCALE].contiguous().view(torch.float32)
    numbers = rows[:, _SCALE:].contiguous().view(form).float() * scale
    return numbers.to(dtype or like.dtype).view(-1, *like.shape)
