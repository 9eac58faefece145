"""Weights of FP8 checkpoints that can be cut: what a rank holds are numbers of the file, and their scales.

transformers keeps a weight (out, in) of such a checkpoint in eight bits, with one scale for each block of values; the
last ones are smaller where sizes do not divide. A cut between blocks leaves every value as it is. Its kernels have one
scale for as many values of the input as a block is wide, so that products with whole blocks depend on nothing else.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.finegrained_fp8 import FP8Linear

from shardcore.errors import NotSupportedError
from shardcore_quantized.packed import BlockWeight

_WHOLE = "Load the model with FineGrainedFP8Config(dequantize=True), which makes it a plain one"


class Form(NamedTuple):
    """How the values of a `WeightFP8` are packed."""

    #: How many rows and columns have one scale.
    block: tuple[int, int]
    #: What ``FP8Linear.forward`` knows beside tensors and blocks.
    options: tuple[tuple[str, Any], ...]


class WeightFP8(BlockWeight):
    """A frozen weight (out, in) of an FP8 checkpoint. Any operation that does not keep it so reads its values.

    Attributes:
        qdata: the values in eight bits, (out, in).
        scale: what each block of them is multiplied by, ``weight_scale_inv``.
        form: a `Form`.
    """

    __slots__ = ()
    called: ClassVar[str] = "a weight of an FP8 checkpoint"
    way_out: ClassVar[str] = "modules_to_not_convert of FineGrainedFP8Config, or its dequantize=True"
    unsharded: ClassVar[str] = "the model that FineGrainedFP8Config(dequantize=True) loads"

    form: Form

    @classmethod
    def of(cls, path: str, module: Any, dtype: torch.dtype) -> WeightFP8:
        """Return what an ``FP8Linear`` holds, whose values are read in ``dtype``; the tensors are shared.

        Raises:
            NotSupportedError: it has no blocks, or lost its scales, or has no values yet.
        """
        if module.weight.is_meta:
            raise NotSupportedError(
                f"{path} is of an FP8 checkpoint, whose parts are not read by shardcore.from_pretrained. Load it by "
                "its class of transformers, Class.from_pretrained(folder, device_map='cpu'), and give it to shard()"
            )
        if module.weight.dtype != torch.float8_e4m3fn:
            raise NotSupportedError(
                f"{path} is an FP8Linear whose weight is {module.weight.dtype}, not torch.float8_e4m3fn: a model in "
                f"FP8 cannot be converted by model.to(dtype). {_WHOLE}"
            )
        if module.block_size is None or module.activation_scheme != "dynamic":
            raise NotSupportedError(
                f"{path} has blocks of {module.block_size} and inputs quantized by a {module.activation_scheme} scale; "
                f"served are blocks, such as (128, 128), and dynamic ones. {_WHOLE}"
            )
        options = {name: getattr(module, name, None) for name in ("activation_scheme", "_deepgemm_disabled")}
        held = {"qdata": module.weight.detach(), "scale": module.weight_scale_inv.detach()}
        rows, columns = module.block_size
        return cls(held, module.weight.shape, dtype, Form((rows, columns), tuple(options.items())))

    @property
    def block(self) -> tuple[int, int]:
        """How many rows and columns have one scale."""
        return self.form.block

    def unit(self, dim: int) -> int:
        """Return of how many rows (``dim`` 0) or columns (1) multiples are whole blocks."""
        return self.block[dim]  # of one alone, too: kernels quantize the input by columns

    def dequantize(self) -> Tensor:
        """Return its values as a plain tensor (out, in), as transformers does where it loads no FP8."""
        scale = self.scale.float()
        for dim, size in enumerate(self.block):
            scale = scale.repeat_interleave(size, dim).narrow(dim, 0, self.shape[dim])
        return (self.qdata.float() * scale).to(self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what ``FP8Linear`` does; on a CPU, for which it has no kernel, the product with the values."""
        return F.linear(x, self.dequantize().to(x.dtype), bias) if x.device.type == "cpu" else self.by_kernel(x, bias)

    def by_kernel(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what ``FP8Linear.forward`` makes of this part."""
        held = {"weight": self.qdata, "weight_scale_inv": self.scale, "bias": bias, "activation_scale": None}
        native: Any = SimpleNamespace(**held, **dict(self.form.options), block_size=list(self.block))
        out: Tensor = FP8Linear.forward(native, x)
        return out
