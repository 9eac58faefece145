"""A region with one column linear, at which it is entered: entry and product are one autograd node.

The MLPs of encoders have one column linear, whose input no other linear shares. Its backward computes the input
gradient, starts the collective, computes the weight gradient meanwhile, and waits; no other node has to record
anything, and no hook runs. See `shardcore.nn.region.region` for what a region is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardcore.comm.collectives import refuse_double_backward
from shardcore.comm.dtensor_params import expect_dtensor, local_tensor, spec_of, with_spec
from shardcore.comm.flow import Flow, GradPlacement
from shardcore.comm.sequence import Gathering, all_gather_tokens, start_reduce_scatter
from shardcore.mesh import ShardContext
from shardcore.nn.linear.functional import as_out_in, autocast, bias_gradient, cast, product, weight_gradient
from shardcore.nn.linear.member import Member
from shardcore.nn.randomness.dropout import DropoutSites
from shardcore.nn.region.region import _WHERE, Region
from shardcore.nn.sequence.shard import enter_region

__all__ = ["SoleRegion"]


class _EnteredLinear(Function):
    """Gather the tokens, where they are split, and multiply; backward: all gradients, beside one collective."""

    flow = Flow(
        GradPlacement.VARYING,
        GradPlacement.REPLICATE,
        parameters=1,
        of_tokens=Flow(GradPlacement.VARYING, GradPlacement.VARYING, parameters=1),
    )

    @staticmethod
    def forward(
        ctx: Any,
        context: ShardContext,
        length: int | None,
        transposed: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.context, ctx.length, ctx.dtype, ctx.weight, ctx.bias = context, length, x.dtype, weight, bias
        ctx.transposed = transposed
        kept = x
        if length is not None:
            x = all_gather_tokens(x, context.channel, length)
            kept = x if context.keeps_gathered else kept
        w, b = as_out_in(local_tensor(weight), transposed), None if bias is None else local_tensor(bias)
        if torch.is_autocast_enabled(x.device.type):
            same = kept is x
            x, w, b = autocast(x, w, b)
            kept = x if same else kept
        ctx.save_for_backward(kept, w)
        return product(x, w, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (grad,) = grads
        x, w = ctx.saved_tensors
        context, length, weight, bias = ctx.context, ctx.length, ctx.weight, ctx.bias
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[3:]
        gathering = None
        if length is not None and needs_weight and not context.keeps_gathered:
            gathering = Gathering(x, context.channel, length)
        gw = gb = sending = None
        if needs_x:
            gx = cast(grad @ w, ctx.dtype)
            channel = context.channel.of_gradients
            sending = channel.start_all_reduce(gx) if length is None else start_reduce_scatter(gx, channel)
        if needs_bias:
            gb = with_spec(bias_gradient(grad, bias.dtype), spec_of(bias))
        if needs_weight:
            x = x if gathering is None else cast(gathering.wait(), w.dtype)
            gw = with_spec(weight_gradient(grad, x, weight.dtype, transposed=ctx.transposed), spec_of(weight))
        return None, None, None, None if sending is None else sending.wait(), gw, gb


class SoleRegion(Region):
    """The region of one column linear, entered at the linear itself.

    Args:
        context: of the sharded model.
        member: the linear, which calls `multiply`.
        dropouts: see `Region`.
    """

    def __init__(self, context: ShardContext, member: Member, dropouts: DropoutSites | None) -> None:
        super().__init__(context, ("input", 0), [member], dropouts)

    def multiply(self, x: Tensor) -> Tensor:
        """Enter with ``x`` and return its product: (..., in), or this rank's tokens of it, to (..., out/tp)."""
        (member,) = self.members
        context, tokens = self.context, self.sequence
        length = None if tokens is None else tokens.length
        if tokens is None or length is None:
            self._fork()
        if not context.fuses_regions or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return member.product(enter_region(x, context.channel, tokens, _WHERE))
        if tokens is not None and length is not None:
            tokens.expect(x, tokens.local, _WHERE)
        expect_dtensor(member.weight)
        out: Tensor = _EnteredLinear.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            context, length, member.transposed, x, member.weight, member.bias
        )
        return out

    def enter(self, x: Tensor) -> Tensor:
        """Enter with ``x``, for a member that multiplies later and in parts."""
        (_, kwargs) = self(self.members[0], (), {self._argument.name: x})
        entered: Tensor = kwargs[self._argument.name]
        return entered
