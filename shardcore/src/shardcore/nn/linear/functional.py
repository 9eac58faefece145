"""The local matrix products of parallel linears: DTensor parameters in, DTensor gradients out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardcore._torch import FakeTensor
from shardcore.comm.collectives import refuse_double_backward
from shardcore.comm.dtensor_params import held, local_tensor, read_local, spec_of, with_spec

__all__ = ["autocast", "bias_gradient", "can_look_at", "cast", "flat", "local_linear", "multiply", "weight_gradient"]


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands of a linear in the dtype that autocast, which is on, would run it in."""
    if not x.is_floating_point() or x.dtype == torch.float64:
        return x, weight, bias
    dtype = torch.get_autocast_dtype(x.device.type)
    return cast(x, dtype), cast(weight, dtype), None if bias is None else cast(bias, dtype)


def can_look_at(x: Tensor) -> bool:
    """Tell whether the values of ``x`` can be checked at no cost: they are there, and on the CPU."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(x, FakeTensor)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` in ``dtype``."""
    return x if x.dtype == dtype else x.to(dtype)


def flat(x: Tensor) -> Tensor:
    """Return (..., n) as (N, n)."""
    return x if x.ndim == 2 else x.reshape(-1, x.size(-1))


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a linear's weight, (out, in), from (..., out) and (..., in)."""
    return cast(flat(grad).t() @ flat(x), dtype)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a linear's bias, (out), from (..., out)."""
    return cast(flat(grad).sum(0), dtype)


class _LocalLinear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.dtype, ctx.weight, ctx.bias = x.dtype, weight, bias
        w, b = local_tensor(weight), None if bias is None else local_tensor(bias)
        if torch.is_autocast_enabled(x.device.type):
            x, w, b = autocast(x, w, b)
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        refuse_double_backward()
        (grad,) = grads
        x, w = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        weight, bias = ctx.weight, ctx.bias
        gx = cast(grad @ w, ctx.dtype) if needs_x else None
        gw = with_spec(weight_gradient(grad, x, weight.dtype), spec_of(weight)) if needs_weight else None
        gb = with_spec(bias_gradient(grad, bias.dtype), spec_of(bias)) if needs_bias else None
        return gx, gw, gb


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by this rank's part of ``weight``: (..., in) to (..., out), both sizes as this rank holds them.

    Args:
        x: this rank's input.
        weight: the DTensor parameter.
        bias: a DTensor parameter or a local tensor whose size matches this rank's outputs.
    """
    held(weight)
    return multiply(x, weight, bias)


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Do what `local_linear` does, with a weight that may be a plain tensor, made of the parameter."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        local = read_local(weight, fresh=True) if bias is None else read_local(weight, bias, fresh=x.ndim > 1)
        return F.linear(x, *local)
    out: Tensor = _LocalLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # untyped in torch
    return out
