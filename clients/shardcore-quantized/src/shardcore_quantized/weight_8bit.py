"""Weights of LLM.int8() that can be cut: what a rank holds are numbers of bitsandbytes, and it multiplies with them.

bitsandbytes quantizes a weight (out, in) row by row, and the input of a product too: each row by its largest value,
without the columns that have an outlier in any row, which are multiplied as they are. Of a part of the columns a rank
knows its outliers; the largest value of a row is that of all ranks, which they tell each other.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
from bitsandbytes import MatmulLtState, matmul  # type: ignore[attr-defined]  # which does not say that it exports them
from bitsandbytes.functional import int8_vectorwise_quant
from torch import Tensor, nn

from shardcore.comm.collectives import Channel
from shardcore.errors import NotSupportedError
from shardcore_quantized.packed import BlockWeight


class Place:
    """Where a weight is: in a module, and divided among the ranks of a channel by columns, or by none."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.channel: Channel | None = None


class Form(NamedTuple):
    """How products with a `Weight8Bit` are computed."""

    #: From which value on an input is an outlier; 0 for none.
    threshold: float
    place: Place


class Weight8Bit(BlockWeight):
    """A frozen weight (out, in) in 8 bits. Any operation that does not keep it so reads its values.

    Attributes:
        qdata: the values in eight bits, (out, in); bitsandbytes' ``CB``.
        scale: the largest value of each row, (out, 1), float32; bitsandbytes' ``SCB``.
        form: a `Form`.
    """

    __slots__ = ()
    called: ClassVar[str] = "a weight of 8 bits"
    way_out: ClassVar[str] = "llm_int8_skip_modules of BitsAndBytesConfig"
    by_pieces: ClassVar[bool] = False

    form: Form

    @classmethod
    def of(cls, module: Any, dtype: torch.dtype) -> Weight8Bit:
        """Return what a quantized ``Linear8bitLt`` holds, with values read in ``dtype``; the tensors are shared."""
        scale = module.state.SCB if module.weight.SCB is None else module.weight.SCB
        held = {"qdata": module.weight.data, "scale": scale.view(-1, 1)}
        return cls(held, module.weight.shape, dtype, Form(module.state.threshold, Place(module)))

    def divided(self, part: Tensor, channel: Channel) -> None:
        """Learn, of the whole weight, that the ranks of ``channel`` each have such a ``part``."""
        self.form.place.channel = channel if part.shape[1] < self.shape[1] else None

    def dequantize(self) -> Tensor:
        """Return its values as a plain tensor (out, in)."""
        return self.qdata.to(self.dtype).mul_(self.scale.mul(1.0 / 127.0))

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what ``Linear8bitLt`` does; of a part of the columns, with the largest values of whole rows."""
        place = self.form.place
        state = MatmulLtState(CB=self.qdata, SCB=self.scale.view(-1))
        state.threshold, state.has_fp16_weights, state.is_training = self.form.threshold, False, place.module.training
        added = None if bias is None else bias.to(x.dtype)
        by_values = state.is_training and x.device.type in ("cpu", "xpu")  # as bitsandbytes' own there
        if place.channel is None or by_values:
            out: Tensor = matmul(x, self.qdata, bias=added, state=state)
            return out
        if torch.is_grad_enabled() and x.requires_grad:
            raise NotSupportedError(
                f"columns of {self.called}, {tuple(self.shape)}, are trained through where torch.compile reads them; "
                "leave out torch.compile, or take BitsAndBytesConfig(load_in_4bit=True)"
            )
        rows = x.reshape(-1, x.shape[-1])
        half = rows.to(torch.float16)
        largest = place.channel.all_reduce_max(int8_vectorwise_quant(half, self.form.threshold)[1])
        whole = torch.cat([half, largest.to(half.dtype).unsqueeze(1)], 1)  # in the last column, what scales a row
        values, scales, outliers = int8_vectorwise_quant(whole, self.form.threshold)
        product: Any = torch.ops.bitsandbytes.int8_mixed_scaled_mm
        parts = (rows, values[:, :-1].contiguous(), self.qdata, scales, state.SCB, outliers, added)
        return product(*parts)[0].view(*x.shape[:-1], -1)  # type: ignore[no-any-return]  # untyped there
