"""Weights of 4 bits that can be cut: what a rank holds is packed as bitsandbytes packs it, and read by its kernels.

bitsandbytes quantizes a weight (out, in) row after row, in blocks of 64 values with one scale each. A cut between two
blocks leaves every value as it is, so that a sharded model computes with the values of the unsharded one. Its own
``Params4bit`` has the packed bytes as its shape; a `Weight4Bit` has the shape and the dtype of the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from bitsandbytes import matmul_4bit  # type: ignore[attr-defined]  # which does not say that it exports it
from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise, quantize_4bit
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardcore.errors import NotSupportedError

_aten: Any = torch.ops.aten
# What the kernels compute in.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Weight4Bit(Tensor):
    """A frozen weight (out, in) in 4 bits. Any operation that does not keep it packed reads its values.

    Attributes:
        packed: two values in each byte, (out * in / 2,), row after row.
        scales: one for each block of values, (out * in / block), float32; bitsandbytes' ``absmax``, of which
            double quantization (``compress_statistics``) is undone: 0.4 bits more for each value.
        block: how many values have one scale.
        kind: ``"nf4"`` or ``"fp4"``.
        compute: the dtype that products are computed in; None for that of the input.
        is_copy: columns of another one, which share no memory with it.
    """

    # No attributes in its dictionary: those of a parameter are handed to the DTensor that is made of it.
    __slots__ = ("block", "compute", "is_copy", "kind", "packed", "scales")
    shardcore_packed: ClassVar[bool] = True  # see `shardcore.comm.dtensor_params.is_packed`

    packed: Tensor
    scales: Tensor
    block: int
    kind: str
    compute: torch.dtype | None
    is_copy: bool

    @staticmethod
    def __new__(
        cls: type[Weight4Bit],
        packed: Tensor,
        scales: Tensor,
        shape: Sequence[int],
        dtype: torch.dtype,
        block: int,
        kind: str,
        compute: torch.dtype | None,
    ) -> Weight4Bit:
        """Return a weight that holds ``packed`` and ``scales`` as they are."""
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)
        made.packed, made.scales, made.block, made.kind, made.compute = packed, scales, block, kind, compute
        made.is_copy = False
        return made

    @classmethod
    def of(cls, parameter: Any, compute: torch.dtype | None) -> Weight4Bit:
        """Return what a quantized ``bitsandbytes.nn.Params4bit`` holds; the bytes are shared."""
        state = parameter.quant_state
        scales = state.absmax
        if state.nested:
            scales = (dequantize_blockwise(scales, state.state2) + state.offset).float()
        packed = parameter.data.view(torch.uint8).view(-1)
        return cls(packed, scales, state.shape, state.dtype, state.blocksize, state.quant_type, compute)

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
        return cls(packed, scales, parameter.shape, parameter.dtype, block, parameter.quant_type, compute)

    @property
    def state(self) -> QuantState:
        """What bitsandbytes' functions call the rest of a packed weight."""
        dtype = self.dtype if self.dtype in _DTYPES else torch.float32
        shape = torch.Size(self.shape)
        return QuantState(  # type: ignore[no-untyped-call]  # untyped there
            self.scales, shape, None, self.block, self.kind, dtype
        )

    def dequantize(self) -> Tensor:
        """Return its values as a plain tensor (out, in)."""
        return dequantize_4bit(self.packed.view(-1, 1), self.state).to(self.dtype)

    def like(self, packed: Tensor, scales: Tensor, shape: Sequence[int] | None = None, **changed: Any) -> Weight4Bit:
        """Return a weight of the same kind that holds something else."""
        rest: dict[str, Any] = {
            "dtype": self.dtype,
            "block": self.block,
            "kind": self.kind,
            "compute": self.compute,
        } | changed
        return Weight4Bit(packed, scales, self.shape if shape is None else shape, **rest)

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own takes more
        return f"Weight4Bit({tuple(self.shape)}, {self.kind}, {self.dtype}, device='{self.device}')"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["packed", "scales"], (self.dtype, self.block, self.kind, self.compute)

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], meta: Any, size: Sequence[int], stride: Any) -> Weight4Bit:
        return Weight4Bit(inner["packed"], inner["scales"], size, *meta)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is F.linear and isinstance(args[1], Weight4Bit):
                return _linear(*args, **(kwargs or {}))
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed otherwise
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (own := _OPERATIONS.get(operation)) is not None and (found := own(*args, **kwargs)) is not None:
            return found
        if operation._schema.is_mutable and isinstance(args[0], Weight4Bit):
            raise NotSupportedError(
                f"{operation} would write into a weight of 4 bits, {tuple(args[0].shape)}, which is frozen. Train "
                "adapters on it, or load the model without quantization_config"
            )
        args, kwargs = tree_map_only(Weight4Bit, Weight4Bit.dequantize, (args, dict(kwargs)))
        return operation(*args, **kwargs)


def _linear(x: Tensor, weight: Weight4Bit, bias: Tensor | None = None) -> Tensor:
    """What ``bitsandbytes.nn.Linear4bit`` does: the product in its dtype, the result in that of the input."""
    dtype = weight.compute or x.dtype
    own, added = x.to(dtype), None if bias is None else bias.to(dtype)
    if dtype in _DTYPES:
        out: Tensor = matmul_4bit(own, weight.packed.view(1, -1), bias=added, quant_state=weight.state)
    else:
        out = F.linear(own, weight.dequantize().to(dtype), added)
    return out.to(x.dtype)


def _product(x: Tensor, weight: Tensor) -> Tensor | None:
    """(n, out) @ (out, in), which a backward computes: in the dtype of the forward."""
    if not isinstance(weight, Weight4Bit):
        return None
    dtype = weight.compute or x.dtype
    return (x.to(dtype) @ weight.dequantize().to(dtype)).to(x.dtype)


def _add_product(total: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    return None if (product := _product(x, weight)) is None else total.add_(product)


def _same(weight: Weight4Bit, *rest: Any, **options: Any) -> Weight4Bit:
    return weight.like(weight.packed, weight.scales)


def _view(weight: Weight4Bit, shape: Sequence[int]) -> Weight4Bit | None:
    return _same(weight) if tuple(shape) == tuple(weight.shape) else None


def _clone(weight: Weight4Bit, **options: Any) -> Weight4Bit:
    return weight.like(weight.packed.clone(), weight.scales.clone())


def _empty_like(weight: Weight4Bit, *, device: Any = None, **options: Any) -> Weight4Bit:
    return weight.like(torch.empty_like(weight.packed, device=device), torch.empty_like(weight.scales, device=device))


def _to(weight: Weight4Bit, **to: Any) -> Weight4Bit | None:
    """Another device, or another dtype of what is read: nothing is unpacked."""
    dtype = to.pop("dtype", None) or weight.dtype
    if not dtype.is_floating_point:
        return None
    to.pop("memory_format", None)
    moved = {name: value for name, value in to.items() if value is not None}
    return weight.like(weight.packed.to(**moved), weight.scales.to(**moved), dtype=dtype)


def _copy(weight: Weight4Bit, values: Tensor, *rest: Any) -> Weight4Bit:
    """Take other values: what an adapter was merged into, or whole tensors of a state dict, is quantized as before."""
    if weight.is_copy:
        raise NotSupportedError(f"columns of a weight of 4 bits, {tuple(weight.shape)}, are a copy: a write is lost")
    if not isinstance(values, Weight4Bit):
        exact = values.to(weight.device, values.dtype if values.dtype in _DTYPES else torch.float32).contiguous()
        packed, state = quantize_4bit(exact, blocksize=weight.block, quant_type=weight.kind)
        values = weight.like(packed.view(-1), state.absmax)
    weight.packed.copy_(values.packed)
    weight.scales.copy_(values.scales)
    return weight


def _add(weight: Weight4Bit, other: Tensor, **options: Any) -> Weight4Bit:
    """In place, as an adapter is merged."""
    return _copy(weight, torch.add(weight.dequantize(), other, **options))


def _sub(weight: Weight4Bit, other: Tensor, **options: Any) -> Weight4Bit:
    return _copy(weight, torch.sub(weight.dequantize(), other, **options))


def _slice(weight: Weight4Bit, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if not isinstance(weight, Weight4Bit) or step != 1:
        return None
    rows, columns = weight.shape
    size = weight.shape[dim]
    first, last = (min(size, at if at >= 0 else at + size) for at in (start or 0, size if end is None else end))
    if (first, last) == (0, size):
        return _same(weight)
    by_rows = dim in (0, -2)
    step_of_rows = weight.block // math.gcd(weight.block, columns)  # so many rows are whole blocks
    unit = step_of_rows if by_rows else weight.block
    if first % unit or (last % unit and last != size) or not (by_rows or columns % weight.block == 0):
        raise NotSupportedError(
            f"a weight of 4 bits, {rows} x {columns}, is quantized in blocks of {weight.block} values along its rows; "
            f"{'rows' if by_rows else 'columns'} {first} to {last} begin or end inside of one. Take a number of ranks "
            f"with which parts are multiples of {unit}, or leave the module out of quantization "
            "(llm_int8_skip_modules of BitsAndBytesConfig)"
        )
    if by_rows:
        shape = (last - first, columns)
        start, stop = first * columns, last * columns
        scales = weight.scales[start // weight.block : stop // weight.block]
        return weight.like(weight.packed[start // 2 : stop // 2], scales, shape)
    shape = (rows, last - first)
    packed = weight.packed.view(rows, -1)[:, first // 2 : last // 2].reshape(-1)
    scales = weight.scales.view(rows, -1)[:, first // weight.block : last // weight.block].reshape(-1)
    made = weight.like(packed, scales, shape)
    made.is_copy = True
    return made


def _cat(weights: Sequence[Tensor], dim: int = 0) -> Weight4Bit | None:
    """Rows of several weights, one after the other."""
    first = weights[0]
    if dim or not all(isinstance(w, Weight4Bit) and w.numel() % w.block == 0 for w in weights):
        return None
    own = cast("Sequence[Weight4Bit]", weights)
    forms = {(w.block, w.kind, w.compute, w.dtype, w.shape[1]) for w in own}
    if len(forms) > 1:
        return None
    shape = (sum(w.shape[0] for w in own), first.shape[1])
    return own[0].like(torch.cat([w.packed for w in own]), torch.cat([w.scales for w in own]), shape)


_OPERATIONS: Mapping[Any, Callable[..., Tensor | None]] = {
    _aten.mm.default: _product,
    _aten.addmm_.default: _add_product,
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.view.default: _view,
    _aten.clone.default: _clone,
    _aten.empty_like.default: _empty_like,
    _aten._to_copy.default: _to,
    _aten.copy_.default: _copy,
    _aten.add_.Tensor: _add,
    _aten.sub_.Tensor: _sub,
    _aten.slice.Tensor: _slice,
    _aten.cat.default: _cat,
}
