"""The local matrix products of parallel linears: DTensor parameters in, DTensor gradients out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.collectives import refuse_double_backward
from shardcore.comm.reads import held, local_tensor, read_local, spec_of, with_spec

__all__ = ["autocast_dtype", "bias_gradient", "cast", "flat", "local_linear", "weight_gradient"]


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast would run a linear in, or None where it leaves the dtype alone."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(kind)


def cast(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return ``x`` in ``dtype`` (None leaves it as it is)."""
    return x if dtype is None or x.dtype == dtype else x.to(dtype)


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
        dtype = autocast_dtype(x)
        w, b = local_tensor(weight), None if bias is None else local_tensor(bias)
        ctx.dtypes = (x.dtype, w.dtype, None if b is None else b.dtype)
        ctx.specs = (spec_of(weight), None if bias is None else spec_of(bias))
        x, w = cast(x, dtype), cast(w, dtype)
        ctx.save_for_backward(x, w)
        return F.linear(x, w, None if b is None else cast(b, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        refuse_double_backward()
        (grad,) = grads
        x, w = ctx.saved_tensors
        gx = gw = gb = None
        if ctx.needs_input_grad[0]:
            gx = cast(grad @ w, ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            gw = with_spec(weight_gradient(grad, x, ctx.dtypes[1]), ctx.specs[0])
        if ctx.needs_input_grad[2]:
            gb = with_spec(bias_gradient(grad, ctx.dtypes[2]), ctx.specs[1])
        return gx, gw, gb


def local_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply by this rank's part of ``weight``: (..., in) to (..., out), both sizes as this rank holds them.

    Args:
        x: this rank's input.
        weight: the DTensor parameter.
        bias: a DTensor parameter or a local tensor whose size matches this rank's outputs.
    """
    held(weight)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        local = read_local(weight) if bias is None else read_local(weight, bias)
        return F.linear(x, *local)
    out: Tensor = _LocalLinear.apply(x, weight, bias)  # type: ignore[no-untyped-call]  # untyped in torch
    return out
