"""Weights that stay packed while they are cut, moved and multiplied with: what all libraries have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardcore.comm.collectives import Channel
from shardcore.errors import NotSupportedError

_aten: Any = torch.ops.aten


class PackedWeight(Tensor):
    """A frozen weight (out, in). Any operation that does not keep it packed reads its values.

    Attributes:
        form: what says, beside the tensors, how values are packed; parts of a weight have that of the whole.
        is_copy: it shares no memory with the weight of which it has columns.
    """

    # No attributes in its dictionary: those of a parameter are handed to the DTensor that is made of it.
    __slots__ = ("form", "is_copy")
    shardcore_packed: ClassVar[bool] = True  # see `shardcore.comm.dtensor_params.is_packed`
    #: The attributes that hold tensors, that of the values first; None where a form has no such tensor.
    names: ClassVar[tuple[str, ...]]
    #: Whether values can be brought into its form, as where an adapter is merged.
    takes_values: ClassVar[bool] = False
    #: What it is in words, and how a module is left as it was.
    called: ClassVar[str]
    way_out: ClassVar[str]
    #: The model into which PEFT merges adapters that were trained on it, where it takes no values.
    unsharded: ClassVar[str] = "the unsharded model"
    #: Whether a product of some rows of an input is that part of the product of all.
    by_pieces: ClassVar[bool] = True

    form: Any
    is_copy: bool

    @staticmethod
    def __new__(
        cls: type[Self],
        tensors: Mapping[str, Tensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        form: Any,
        is_copy: bool = False,
    ) -> Self:
        """Return a weight that holds ``tensors`` as they are."""
        device = tensors[cls.names[0]].device
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        for name in cls.names:
            setattr(made, name, tensors.get(name))
        made.form, made.is_copy = form, is_copy
        return made

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What it holds."""
        return {name: held for name in self.names if (held := getattr(self, name)) is not None}

    def like(
        self,
        tensors: Mapping[str, Tensor],
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        *,
        is_copy: bool = False,
    ) -> Self:
        """Return a weight of the same form that holds something else."""
        return type(self)(tensors, self.shape if shape is None else shape, dtype or self.dtype, self.form, is_copy)

    def each(self, change: Callable[[Tensor], Tensor], dtype: torch.dtype | None = None) -> Self:
        """Return a weight that holds what ``change`` returns for each tensor."""
        return self.like({name: change(held) for name, held in self.tensors.items()}, dtype=dtype)

    @property
    @abstractmethod
    def blocks(self) -> str:
        """The values that have one scale, in words."""

    @abstractmethod
    def dequantize(self) -> Tensor:
        """Return its values as a plain tensor (out, in)."""

    @abstractmethod
    def has_whole_blocks(self, rows: int, columns: int) -> bool:
        """Tell whether a part of that size can be whole blocks."""

    @abstractmethod
    def unit(self, dim: int) -> int:
        """Return of how many rows (``dim`` 0) or columns (1) multiples are whole blocks."""

    @abstractmethod
    def cut(self, dim: int, first: int, last: int) -> Self:
        """Return rows (``dim`` 0) or columns (1) from ``first`` to before ``last``, which begin and end blocks."""

    @abstractmethod
    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return what the module of the library computes."""

    def divided(self, part: Tensor, channel: Channel) -> None:
        """Learn, of the whole weight, that the ranks of ``channel`` each have such a ``part``."""

    def computes_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return what products with an input of ``dtype`` are computed in."""
        return dtype

    def quantized(self, values: Tensor) -> Mapping[str, Tensor]:
        """Return what a weight holds that has ``values``, a plain tensor (out, in), in blocks of its own.

        Raises:
            NotSupportedError: there is no such.
        """
        raise self.frozen("copy_")

    def frozen(self, what: object) -> NotSupportedError:
        """Return the error of an operation that would write into it."""
        return NotSupportedError(
            f"{what} would write into {self.called}, {tuple(self.shape)}, which is frozen. Train adapters on it, or "
            "load the model without quantization_config"
        )

    def __repr__(self) -> str:  # type: ignore[override]  # torch's own takes more
        return f"{type(self).__name__}({tuple(self.shape)}, {self.form}, {self.dtype}, device='{self.device}')"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return list(self.tensors), (self.dtype, self.form)

    @classmethod
    def __tensor_unflatten__(cls, inner: Mapping[str, Tensor], meta: Any, size: Sequence[int], stride: Any) -> Self:
        return cls(inner, size, *meta)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function is F.linear and isinstance(args[1], PackedWeight):
            return _linear(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own is typed otherwise
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if (own := _OPERATIONS.get(operation)) is not None and (found := own(*args, **kwargs)) is not None:
            return found
        if operation._schema.is_mutable and isinstance(args[0], PackedWeight):
            raise args[0].frozen(operation)
        args, kwargs = tree_map_only(PackedWeight, lambda weight: weight.dequantize(), (args, dict(kwargs)))
        return operation(*args, **kwargs)


class BlockWeight(PackedWeight):
    """One whose values (out, in) are each a number of few bits, ``qdata``, and which has a ``scale`` for each block."""

    __slots__ = ("qdata", "scale")
    names: ClassVar[tuple[str, ...]] = ("qdata", "scale")

    qdata: Tensor
    scale: Tensor

    @property
    def block(self) -> tuple[int, int]:
        """How many rows and columns have one scale."""
        rows, columns = (whole // parts for whole, parts in zip(self.qdata.shape, self.scale.shape, strict=True))
        return rows, columns

    @property
    def blocks(self) -> str:
        """The values that have one scale, in words."""
        return "{} x {} values".format(*self.block)

    def has_whole_blocks(self, rows: int, columns: int) -> bool:
        """Tell whether a part of that size can be whole blocks."""
        sizes = enumerate(zip((rows, columns), self.shape, strict=True))
        return all(size == whole or not size % self.unit(dim) for dim, (size, whole) in sizes)

    def unit(self, dim: int) -> int:
        """Return of how many rows (``dim`` 0) or columns (1) multiples are whole blocks: any, where there is one."""
        return 1 if self.scale.shape[dim] == 1 else self.block[dim]

    def cut(self, dim: int, first: int, last: int) -> Self:
        """Return rows (``dim`` 0) or columns (1) from ``first`` to before ``last``, which begin and end blocks."""
        unit, several = self.unit(dim), self.scale.shape[dim] > 1
        begin, end = first // unit, -(-last // unit)  # the last block may be a smaller one
        held = {name: part.narrow(dim, begin, end - begin) if several else part for name, part in self.tensors.items()}
        held["qdata"] = self.qdata.narrow(dim, first, last - first)
        return self.like(held, held["qdata"].shape)


def _linear(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    return weight.linear(x, bias)


def _product(x: Tensor, weight: Tensor) -> Tensor | None:
    """(n, out) @ (out, in), which a backward computes: in the dtype of the forward."""
    if not isinstance(weight, PackedWeight):
        return None
    dtype = weight.computes_in(x.dtype)
    return (x.to(dtype) @ weight.dequantize().to(dtype)).to(x.dtype)


def _add_product(total: Tensor, x: Tensor, weight: Tensor) -> Tensor | None:
    return None if (product := _product(x, weight)) is None else total.add_(product)


def _same(weight: PackedWeight, *rest: Any, **options: Any) -> PackedWeight:
    return weight.like(weight.tensors, is_copy=weight.is_copy)


def _view(weight: PackedWeight, shape: Sequence[int]) -> PackedWeight | None:
    return _same(weight) if tuple(shape) == tuple(weight.shape) else None


def _clone(weight: PackedWeight, **options: Any) -> PackedWeight:
    return weight.each(torch.clone)


def _empty_like(weight: PackedWeight, *, device: Any = None, **options: Any) -> PackedWeight:
    return weight.each(lambda held: torch.empty_like(held, device=device))


def _to(weight: PackedWeight, **to: Any) -> PackedWeight | None:
    """Another device, or another dtype of what is read: nothing is unpacked."""
    dtype = to.pop("dtype", None) or weight.dtype
    if not dtype.is_floating_point:
        return None
    to.pop("memory_format", None)
    moved = {name: value for name, value in to.items() if value is not None}
    return weight.each(lambda held: held.to(**moved), dtype)


def _copy(weight: Tensor, values: Tensor, *rest: Any) -> PackedWeight | None:
    """Take other values: what an adapter was merged into, or whole tensors of a state dict, is quantized as before."""
    if not isinstance(weight, PackedWeight):
        return None
    if weight.is_copy:
        raise NotSupportedError(f"columns of {weight.called}, {tuple(weight.shape)}, are a copy: a write is lost")
    new = values.tensors if isinstance(values, PackedWeight) else weight.quantized(values.to(weight.device))
    for name, held in weight.tensors.items():
        held.copy_(new[name])
    return weight


def _add(weight: Tensor, other: Tensor, **options: Any) -> PackedWeight | None:
    """In place, as an adapter is merged."""
    return _copy(weight, torch.add(weight.dequantize(), other, **options)) if isinstance(weight, PackedWeight) else None


def _sub(weight: Tensor, other: Tensor, **options: Any) -> PackedWeight | None:
    return _copy(weight, torch.sub(weight.dequantize(), other, **options)) if isinstance(weight, PackedWeight) else None


def _slice(weight: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Any:
    if not isinstance(weight, PackedWeight) or step != 1:
        return None
    size = weight.shape[dim]
    first, last = (min(size, at if at >= 0 else at + size) for at in (start or 0, size if end is None else end))
    if (first, last) == (0, size):
        return _same(weight)
    unit = weight.unit(dim % 2)
    if first % unit or (last % unit and last != size):
        raise NotSupportedError(
            f"{weight.called}, {weight.shape[0]} x {weight.shape[1]}, is quantized in blocks of {weight.blocks}; "
            f"{('rows', 'columns')[dim % 2]} {first} to {last} begin or end inside of one. Take a number of ranks with "
            f"which parts are multiples of {unit}, or leave the module out of quantization ({weight.way_out})"
        )
    return weight.cut(dim % 2, first, last)


def _cat(weights: Sequence[Tensor], dim: int = 0) -> PackedWeight | None:
    """Rows of several weights, one after the other."""
    own = [weight for weight in weights if isinstance(weight, PackedWeight)]
    first = own[0]
    if dim or len(own) < len(weights) or len({(type(w), w.form, w.dtype, w.shape[1], w.blocks) for w in own}) > 1:
        return None
    if any(weight.shape[0] % weight.unit(0) for weight in own):
        return None
    joined = {name: torch.cat([weight.tensors[name] for weight in own]) for name in first.tensors}
    return first.like(joined, (sum(weight.shape[0] for weight in own), first.shape[1]))


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
