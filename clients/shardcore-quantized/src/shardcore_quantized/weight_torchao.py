"""Weights that torchao has quantized, that can be cut: a part is what torchao makes of that part, and read by it.

torchao gives one scale to a row, to so many values of a row, to a square of values or to the whole weight. A cut
between such blocks leaves every value as it is, and so does one through a block that is as long as the weight: both
sides have its scale.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torchao.quantization import Float8Tensor, Int8Tensor, IntxUnpackedToInt8Tensor

from shardcore.errors import NotSupportedError
from shardcore_quantized.packed import BlockWeight

_KINDS = (Int8Tensor, Float8Tensor, IntxUnpackedToInt8Tensor)
# Those that its classes take.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What quantizes the input of a product, from whole rows of it.
_OF_INPUTS = ("act_quant_kwargs", "act_pre_scale", "activation_quantization")


class Form(NamedTuple):
    """How the values of a `WeightTorchao` are packed."""

    #: The class of torchao.
    kind: type[Tensor]
    #: What it is made with beside tensors, blocks and dtype.
    options: tuple[tuple[str, Any], ...]


class WeightTorchao(BlockWeight):
    """A frozen weight (out, in) that torchao has quantized. Any operation that does not keep it so reads its values.

    Attributes:
        qdata: the values in eight bits, (out, in).
        scale: one for each block of values, (out / rows of a block, in / columns of a block).
        zero_point: likewise what stands for zero; None where zero does.
        form: a `Form`.
    """

    __slots__ = ("zero_point",)
    names: ClassVar[tuple[str, ...]] = ("qdata", "scale", "zero_point")
    called: ClassVar[str] = "a weight that torchao has quantized"
    way_out: ClassVar[str] = "modules_to_not_convert of TorchAoConfig"

    zero_point: Tensor | None
    form: Form

    @classmethod
    def of(cls, path: str, parameter: Any) -> WeightTorchao:
        """Return what a quantized parameter of a linear holds; the tensors are shared.

        Raises:
            NotSupportedError: it is packed in another way, or products with it depend on whole rows of their input.
        """
        kind = next((kind for kind in _KINDS if isinstance(parameter, kind)), None)
        if kind is None:
            raise NotSupportedError(
                f"{path} is a {type(parameter).__name__} of torchao, which cannot be divided. Can be: weights alone in "
                "eight bits or fewer, Int8WeightOnlyConfig, IntxWeightOnlyConfig and Float8WeightOnlyConfig"
            )
        if any(getattr(parameter, name, None) is not None for name in _OF_INPUTS):
            raise NotSupportedError(
                f"{path} quantizes its input too, which depends on whole rows of that. Take a configuration that "
                "quantizes weights alone, such as Int8WeightOnlyConfig"
            )
        names = (*parameter.tensor_attribute_names, *getattr(parameter, "optional_tensor_attribute_names", ()))
        options = {name: getattr(parameter, name) for name in names if name not in ("block_size", "dtype")}
        held = {name: part for name in cls.names if (part := getattr(parameter, name, None)) is not None}
        if held["scale"].numel() == 1:  # one for each row is the same, and can be cut and joined
            rows = parameter.shape[0]
            held |= {name: part.reshape(1, 1).expand(rows, 1) for name, part in held.items() if name != "qdata"}
        return cls(held, parameter.shape, parameter.dtype, Form(kind, tuple(options.items())))

    def native(self) -> Tensor:
        """Return it as torchao has it."""
        dtype = self.dtype if self.dtype in _DTYPES else torch.float32
        kind: Any = self.form.kind
        made: Tensor = kind(**self.tensors, **dict(self.form.options), block_size=list(self.block), dtype=dtype)
        return made

    def dequantize(self) -> Tensor:
        """Return its values as a plain tensor (out, in)."""
        return self.native().dequantize().to(self.dtype)

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what a ``torch.nn.Linear`` with such a weight does."""
        dtypes = {x.dtype, self.dtype} if bias is None else {x.dtype, self.dtype, bias.dtype}
        plain = not dtypes <= set(_DTYPES)  # of which torchao knows nothing
        return F.linear(x, self.dequantize().to(x.dtype) if plain else self.native(), bias)
