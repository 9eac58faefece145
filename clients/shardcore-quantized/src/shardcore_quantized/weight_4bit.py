"""Weights of 4 bits that can be cut: what a rank holds is packed as bitsandbytes packs it, and read by its kernels.

bitsandbytes quantizes a weight (out, in) row after row, in blocks of 64 values with one scale each. A cut between two
blocks leaves every value as it is, so that a sharded model computes with the values of the unsharded one. Its own
``Params4bit`` has the packed bytes as its shape; a `Weight4Bit` has the shape and the dtype of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]  # which does not say that it exports it
from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise, quantize_4bit
from torch import Tensor

from shardcore.errors import NotSupportedError
from shardcore_quantized.packed import PackedWeight

# What the kernels compute in.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Form(NamedTuple):
    """How the values of a `Weight4Bit` are packed."""

    #: How many values have one scale.
    block: int
    #: ``"nf4"`` or ``"fp4"``.
    kind: str
    #: The dtype that products are computed in; None for that of the input.
    compute: torch.dtype | None


class Weight4Bit(PackedWeight):
    """A frozen weight (out, in) in 4 bits. Any operation that does not keep it packed reads its values.

    Attributes:
        packed: two values in each byte, (out * in / 2,), row after row.
        scales: one for each block of values, (out * in / block), float32; bitsandbytes' ``absmax``, of which
            double quantization (``compress_statistics``) is undone: 0.4 bits more for each value.
        form: a `Form`.
    """

    __slots__ = ("packed", "scales")
    names: ClassVar[tuple[str, ...]] = ("packed", "scales")
    takes_values: ClassVar[bool] = True
    called: ClassVar[str] = "a weight of 4 bits"
    way_out: ClassVar[str] = "llm_int8_skip_modules of BitsAndBytesConfig"

    packed: Tensor
    scales: Tensor
    form: Form

    @classmethod
    def of(cls, parameter: Any, compute: torch.dtype | None) -> Weight4Bit:
        """Return what a quantized ``bitsandbytes.nn.Params4bit`` holds; the bytes are shared."""
        state = parameter.quant_state
        scales = state.absmax
        if state.nested:
            scales = (dequantize_blockwise(scales, state.state2) + state.offset).float()
        held = {"packed": parameter.data.view(torch.uint8).view(-1), "scales": scales}
        return cls(held, state.shape, state.dtype, Form(state.blocksize, state.quant_type, compute))

    @classmethod
    def to_come(cls, parameter: Any, compute: torch.dtype | None) -> Weight4Bit:
        """Return one on the meta device, for the values that a ``Params4bit`` there is to be given."""
        block = parameter.blocksize
        if parameter.numel() % block:
            raise NotSupportedError(
                f"a weight {tuple(parameter.shape)} is no whole number of blocks of {block} values; name its module in "
                "llm_int8_skip_modules of the BitsAndBytesConfig"
            )
        packed = torch.empty(parameter.numel() // 2, dtype=torch.uint8, device="meta")
        scales = torch.empty(parameter.numel() // block, device="meta")
        form = Form(block, parameter.quant_type, compute)
        return cls({"packed": packed, "scales": scales}, parameter.shape, parameter.dtype, form)

    @property
    def state(self) -> QuantState:
        """What bitsandbytes' functions call the rest of a packed weight."""
        dtype = self.dtype if self.dtype in _DTYPES else torch.float32
        shape = torch.Size(self.shape)
        return QuantState(  # type: ignore[no-untyped-call]  # untyped there
            self.scales, shape, None, self.form.block, self.form.kind, dtype
        )

    @property
    def blocks(self) -> str:
        """The values that have one scale, in words."""
        return f"{self.form.block} values along its rows"

    def dequantize(self) -> Tensor:
        """Return its values as a plain tensor (out, in)."""
        return dequantize_4bit(self.packed.view(-1, 1), self.state).to(self.dtype)

    def has_whole_blocks(self, rows: int, columns: int) -> bool:
        """Tell whether a part of that size can be whole blocks."""
        block = self.form.block
        return not (rows * columns % block or (columns != self.shape[1] and columns % block))

    def unit(self, dim: int) -> int:
        """Return of how many rows (``dim`` 0) or columns (1) multiples are whole blocks."""
        columns, block = self.shape[1], self.form.block
        if dim:
            return columns if columns % block else block  # blocks go on from row to row
        return block // math.gcd(block, columns)

    def cut(self, dim: int, first: int, last: int) -> Self:
        """Return rows (``dim`` 0) or columns (1) from ``first`` to before ``last``, which begin and end blocks."""
        rows, columns = self.shape
        block = self.form.block
        if dim == 0:
            start, stop = first * columns, last * columns
            held = {
                "packed": self.packed[start // 2 : stop // 2],
                "scales": self.scales[start // block : stop // block],
            }
            return self.like(held, (last - first, columns))
        held = {
            "packed": self.packed.view(rows, -1)[:, first // 2 : last // 2].reshape(-1),
            "scales": self.scales.view(rows, -1)[:, first // block : last // block].reshape(-1),
        }
        return self.like(held, (rows, last - first), is_copy=True)

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return what products with an input of ``dtype`` are computed in."""
        return self.form.compute or dtype

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what ``bitsandbytes.nn.Linear4bit`` does: the product in its dtype, the result in that of ``x``."""
        dtype = self.computes_in(x.dtype)
        own, added = x.to(dtype), None if bias is None else bias.to(dtype)
        if dtype in _DTYPES:
            out: Tensor = matmul_4bit(own, self.packed.view(1, -1), bias=added, quant_state=self.state)
        else:
            out = F.linear(own, self.dequantize().to(dtype), added)
        return out.to(x.dtype)

    def quantized(self, values: Tensor) -> Mapping[str, Tensor]:
        """Return what a weight holds that has ``values``, in blocks of its own."""
        exact = values.to(values.dtype if values.dtype in _DTYPES else torch.float32).contiguous()
        packed, state = quantize_4bit(exact, blocksize=self.form.block, quant_type=self.form.kind)
        return {"packed": packed.view(-1), "scales": state.absmax}
