"""Activations, their gradients and gathered parameters in 8 bits: half the bytes of bfloat16, and rounding.

Each part that travels has a scale of its own, the largest of its absolute values over the largest of the format: 4 bits
of exponent and 3 of mantissa (e4m3) for activations, 5 and 2 (e5m2), of a wider range, for gradients (Micikevicius et
al. 2022, https://arxiv.org/abs/2209.05433). A sum is an exchange of parts, a sum in float32, and a gather of the sums:
every number is rounded twice, and all ranks end with the same bits. After ColossalAI's ``fp8_communication``.

    Fp8Channel   between tensor-parallel ranks: regions' sums, gathers and scatters
    Fp8Wire      between the stages of a pipeline: what a stage sends is a tensor of bytes that autograd goes through
    Fp8Gather    between the ranks that FSDP2 gathers parameters from
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from typing_extensions import override

from shardcore._torch import funcol
from shardcore.comm.collectives import Channel, Pending
from shardcore.comm.gradients import ELSEWHERE

_ACTIVATIONS, _GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
_SCALE = 4  # bytes in front of a part


class Fp8Channel(Channel):
    """Sends floating-point numbers in 8 bits, as ``form``; everything else, and what `exact` sends, as it is."""

    def __init__(self, group: ProcessGroup, form: torch.dtype = _ACTIVATIONS) -> None:
        super().__init__(group)
        self._exact, self._form = Channel(group), form
        self._of_gradients = Fp8Channel(group, _GRADIENTS) if form is not _GRADIENTS else self

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


class Fp8Wire(torch.autograd.Function):
    """A floating-point tensor as what travels between stages, or back as one of the shape and dtype of ``like``.

    What travels counts as float32, of which its bytes are made, so that its gradient travels back in as many.
    """

    flow = ELSEWHERE

    @staticmethod
    def forward(ctx: Any, x: Tensor, like: Tensor | None = None) -> Tensor:
        """Return the bytes of ``x``; or the tensor that they are of, if it is known what it is ``like``."""
        ctx.form = None if like is not None else torch.empty_like(x, device="meta")
        return _packed(x, _ACTIVATIONS) if like is None else _unpacked(x, _ACTIVATIONS, like)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Return the gradient, which goes the other way."""
        return _packed(grad, _GRADIENTS) if ctx.form is None else _unpacked(grad, _GRADIENTS, ctx.form), None

    @staticmethod
    def form(of: Tensor) -> Tensor:
        """Return the form, on meta, of what travels for a tensor."""
        words = -(-(_SCALE + of.numel()) // 4)
        return torch.empty(words, device="meta", requires_grad=of.requires_grad) if of.is_floating_point() else of

    @staticmethod
    def send(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return what travels for ``tensors``."""
        return tuple(_wired(x) if x.is_floating_point() else x for x in tensors)

    @staticmethod
    def receive(arrived: Sequence[Tensor], forms: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors for which something has arrived."""
        pairs = zip(arrived, forms, strict=True)
        return [_wired(x, form) if form.is_floating_point() else x for x, form in pairs]


_wired: Callable[..., Tensor] = Fp8Wire.apply


def _packed(x: Tensor, form: torch.dtype) -> Tensor:
    return pack(x.reshape(1, -1), form)[0].view(torch.float32)


def _unpacked(wire: Tensor, form: torch.dtype, like: Tensor) -> Tensor:
    return unpack(wire.view(torch.uint8)[None], form, like)[0]


class Fp8Gather:
    """How a unit of FSDP2 gathers its parameters; see `torch.distributed.fsdp.FSDPModule.set_custom_all_gather`.

    Each rank sends what it holds of the unit as one part. What it holds itself stays as it is, and is what is saved and
    stepped; all ranks compute with the same rounded numbers.
    """

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return where the parameters are gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False) -> Any:
        """Gather ``input_tensor`` (n) of each rank into ``output_tensor`` (ranks * n), which may hold it already.

        Parameters of several dtypes are bytes by now, and travel as they are.
        """
        if not input_tensor.is_floating_point():
            return dist.all_gather_into_tensor(output_tensor, input_tensor, group, async_op)
        pending = Channel(group).start_all_gather(pack(input_tensor.view(1, -1), _ACTIVATIONS))

        def finish() -> Tensor:
            for rows, part in zip(pending.wait(), output_tensor.chunk(group.size()), strict=True):  # one at a time
                part.copy_(unpack(rows, _ACTIVATIONS, part)[0])
            return output_tensor

        if async_op:
            return Pending(None, finish, output_tensor)
        finish()
        return None


def _stays(x: Tensor) -> bool:
    return x.is_meta or not x.is_floating_point()


def pack(parts: Tensor, form: torch.dtype) -> Tensor:
    """Return each row in 8 bits behind its scale: (parts, n) to bytes (parts, 4 + n), filled up to a multiple of 4.

    A row that has a number which is none, or infinite, is none in all of its places.
    """
    scale = parts.abs().amax(1, keepdim=True).float() / torch.finfo(form).max
    scale = torch.where(scale == 0, 1.0, scale)
    rows = torch.cat([scale.view(torch.uint8), (parts.float() / scale).to(form).view(torch.uint8)], 1)
    return F.pad(rows, (0, -rows.size(1) % 4))


def unpack(rows: Tensor, form: torch.dtype, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return the numbers of `pack`: its bytes to (parts, *shape), with shape and dtype of ``like``."""
    scale = rows[:, :_SCALE].contiguous().view(torch.float32)
    numbers = rows[:, _SCALE : _SCALE + like.numel()].contiguous().view(form).float() * scale
    return numbers.to(dtype or like.dtype).view(-1, *like.shape)
