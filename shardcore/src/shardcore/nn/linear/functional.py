"""The local matrix products of parallel linears: DTensor parameters in, DTensor gradients out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from shardcore._torch import FakeTensor
from shardcore.comm.collectives import refuse_double_backward
from shardcore.comm.dtensor_params import expect_dtensor, local_tensor, read_local, spec_of, with_spec
from shardcore.comm.gradients import LEAVES_SPLIT, Flow
from shardcore.mesh.context import ShardContext
from shardcore.transfer.products import gather_products, scatter_product


def as_out_in(weight: Tensor, transposed: bool) -> Tensor:
    """Return a weight as (out, in), without a copy."""
    return weight.t() if transposed else weight


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


def weight_gradient(grad: Tensor, x: Tensor, dtype: torch.dtype, *, transposed: bool = False) -> Tensor:
    """Return the gradient of a weight, (out, in) or ``transposed`` (in, out), from (..., out) and (..., in)."""
    left, right = (x, grad) if transposed else (grad, x)
    return cast(flat(left).t() @ flat(right), dtype)


def bias_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of a linear's bias, (out), from (..., out)."""
    return cast(flat(grad).sum(0), dtype)


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return what `torch.nn.functional.linear` does, for the forward of a Function.

    Of more than two dims with a bias, torch returns a view of two dims. A view that a Function returns may not be
    changed in place, as models do (``query /= scale``): what is returned here is no view.
    """
    out = F.linear(x, weight, bias)
    return out if bias is None or out.ndim <= 2 else torch.ops.aten._unsafe_view(out, out.shape)


class _LocalLinear(Function):
    flow = Flow(of_tokens=LEAVES_SPLIT)

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool, scatters: ShardContext | None
    ) -> Tensor:
        ctx.dtype, ctx.weight, ctx.bias, ctx.transposed = x.dtype, weight, bias, transposed
        ctx.scatters, ctx.length = scatters, None if scatters is None else x.size(1)
        w, b = local_tensor(weight), None if bias is None else local_tensor(bias)
        w = w.t() if transposed else w
        if torch.is_autocast_enabled(x.device.type):
            x, w, b = autocast(x, w, b)
        ctx.save_for_backward(x, w)
        if scatters is not None:
            return scatter_product(x, w, scatters.channel, scatters.overlap)
        return F.linear(x, w) if b is None else product(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        refuse_double_backward()
        (grad,) = grads
        x, w = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        weight, bias, context = ctx.weight, ctx.bias, ctx.scatters
        if context is None:
            gx = cast(grad @ w, ctx.dtype) if needs_x else None
        else:
            factors = [(w.t(), None)] if needs_x else []
            grad, made = gather_products(grad, factors, context.channel.of_gradients, ctx.length, context.overlap)
            gx = cast(made[0], ctx.dtype) if made else None
        gw = None
        if needs_weight:
            gw = with_spec(weight_gradient(grad, x, weight.dtype, transposed=ctx.transposed), spec_of(weight))
        gb = with_spec(bias_gradient(grad, bias.dtype), spec_of(bias)) if needs_bias else None
        return gx, gw, gb, None, None


def local_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    transposed: bool = False,
    scatters: ShardContext | None = None,
) -> Tensor:
    """Multiply by this rank's part of ``weight``: (..., in) to (..., out), both sizes on this rank.

    Weight, (out, in) or ``transposed`` (in, out), and bias are DTensors; a plain tensor that somebody has put in the
    place of one is refused. ``scatters``, in training: the sum over its ranks is scattered while more is multiplied,
    (B, S, in) to this rank's tokens (B, L, out).
    """
    if not isinstance(weight, DTensor):
        expect_dtensor(weight)
    if bias is not None and not isinstance(bias, DTensor):
        expect_dtensor(bias)
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return multiply(x, weight, bias, transposed=transposed)
    out: Tensor = _LocalLinear.apply(x, weight, bias, transposed, scatters)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor:
    """Do what `local_linear` does, with a weight that may be a plain tensor, made of the parameter."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        local = read_local(weight, fresh=True) if bias is None else read_local(weight, bias, fresh=x.ndim > 1)
        return F.linear(x, as_out_in(local[0], transposed), *local[1:])
    out: Tensor = _LocalLinear.apply(x, weight, bias, transposed, None)  # type: ignore[no-untyped-call]  # untyped in torch
    return out
