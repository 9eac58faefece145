"""What accelerators compute in one kernel, and CPUs in several operations that keep more for the backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

_NORM, _DROPOUT, _ATTENTION = functional.rms_norm, functional.dropout, functional.scaled_dot_product_attention


class OneKernel(TorchFunctionMode):
    """Has fake tensors of the CPU keep what tensors of an accelerator keep.

    Without an accelerator torch makes no fake tensors of one that have gradients, and what an operation keeps depends
    on the device: a root-mean-square norm keeps its input and one number for each row, dropout a mask of bytes, and
    attention that drops out keeps no scores. What is returned has shapes and no values.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.backward, torch.autograd.backward):
            # A checkpoint recomputes in there, where torch has put the mode aside.
            with mock.patch.dict(vars(functional), {native.__name__: own for native, own in _STAND_INS.items()}):
                return func(*args, **(kwargs or {}))
        stand_in = None if any(issubclass(kind, DTensor) for kind in types) else _STAND_INS.get(func)
        return func(*args, **(kwargs or {})) if stand_in is None else stand_in(*args, **(kwargs or {}))


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, rows: Sequence[int]) -> Tensor:
        exact = x.dtype if x.dtype == torch.float64 else torch.float32
        ctx.save_for_backward(x, weight, x.new_empty((*rows, 1), dtype=exact))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, _norms = ctx.saved_tensors
        needed = zip((x, weight), ctx.needs_input_grad, strict=False)
        of_x, of_weight = (torch.empty_like(tensor) if needs else None for tensor, needs in needed)
        return of_x, of_weight, None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.empty_like(gradient)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != x.dtype:  # which no kernel takes
        return _NORM(x, shape, weight, eps)
    return _Norm.apply(x, weight, x.shape[: x.dim() - len(shape)])  # type: ignore[no-any-return,no-untyped-call]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return _DROPOUT(x, p, training, inplace)
    return _Dropout.apply(x)  # type: ignore[no-any-return,no-untyped-call]


def _attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    names = ("attn_mask", "dropout_p", "is_causal")
    kept = {**dict(zip(names, args, strict=False)), **kwargs, "dropout_p": 0.0}
    return _ATTENTION(query, key, value, **kept)


_STAND_INS: dict[Any, Callable[..., Tensor]] = {_NORM: _rms_norm, _DROPOUT: _dropout, _ATTENTION: _attention}
