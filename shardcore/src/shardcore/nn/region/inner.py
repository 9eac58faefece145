"""Regions that are entered elsewhere than in front of all that they hold: at one linear, or inside of a module.

The MLPs of encoders have one column linear, whose input no other linear shares: entry and product are one autograd
node. Its backward computes the input gradient, starts the collective, computes the weight gradient meanwhile, and
waits; no other node has to record anything, and no hook runs.

In latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) one replicated linear makes the latent states, from
which column linears make keys and values, and a rotary key that all heads read. Both are used by this rank's heads, so
the gradient of what the linear returns is summed; the linear itself and all before it then work on whole tensors with
whole gradients, on every rank alike. Latent states are smaller than the input of the module, and so is what is sent.
See `shardcore.nn.region.region` for what a region is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from shardcore.comm.collectives import copy_to_tp, refuse_double_backward
from shardcore.comm.dtensor_params import expect_dtensor, local_tensor, spec_of, with_spec
from shardcore.comm.gradients import Flow, GradPlacement
from shardcore.comm.sequence import all_gather_tokens, gather_sequence, join_parts, start_reduce_scatter
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.linear.functional import as_out_in, autocast, bias_gradient, cast, product, weight_gradient
from shardcore.nn.linear.members import Member
from shardcore.nn.randomness import DropoutSites
from shardcore.nn.region.region import _WHERE, Region
from shardcore.nn.sequence.shard import enter_region
from shardcore.transfer.products import gather_products


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
        kept, ready = x, None
        w, b = as_out_in(local_tensor(weight), transposed), None if bias is None else local_tensor(bias)
        if length is not None:
            if context.overlap:
                x, (ready,) = gather_products(x, [(w, b)], context.channel, length, context.overlap)
            else:
                x = all_gather_tokens(x, context.channel, length)
            kept = x if context.keeps_gathered else kept
        if torch.is_autocast_enabled(x.device.type):
            same = kept is x
            x, w, b = autocast(x, w, b)
            kept = x if same else kept
        ctx.save_for_backward(kept, w)
        return product(x, w, b) if ready is None else ready

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        (grad,) = grads
        x, w = ctx.saved_tensors
        context, length, weight, bias = ctx.context, ctx.length, ctx.weight, ctx.bias
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[3:]
        gathering = None
        if length is not None and needs_weight and not context.keeps_gathered:
            gathering = context.channel.start_all_gather(x)
        gw = gb = sending = None
        if needs_x:
            gx = cast(grad @ w, ctx.dtype)
            channel = context.channel.of_gradients
            sending = channel.start_all_reduce(gx) if length is None else start_reduce_scatter(gx, channel)
        if needs_bias:
            gb = with_spec(bias_gradient(grad, bias.dtype), spec_of(bias))
        if needs_weight:
            x = x if gathering is None else cast(join_parts(gathering.wait(), length), w.dtype)
            gw = with_spec(weight_gradient(grad, x, weight.dtype, transposed=ctx.transposed), spec_of(weight))
        return None, None, None, None if sending is None else sending.wait(), gw, gb


class SoleRegion(Region):
    """The region of one column linear, entered at the linear itself, which calls `multiply`."""

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
        if member.bias is not None:
            expect_dtensor(member.bias)
        out: Tensor = _EnteredLinear.apply(  # type: ignore[no-untyped-call]  # untyped in torch
            context, length, member.transposed, x, member.weight, member.bias
        )
        return out

    def enter(self, x: Tensor) -> Tensor:
        """Enter with ``x``, for a member that multiplies later and in parts."""
        (_, kwargs) = self(self.members[0], (), {self._argument.name: x})
        entered: Tensor = kwargs[self._argument.name]
        return entered


class InnerRegion(Region):
    """A region whose entries are inside of its module.

    The hook on the module's call gathers the tokens, where they are split: forward an all-gather, backward this rank's
    tokens, since the gradient there is whole. The entries are identities whose backward is an all-reduce. Dropout
    before the first of them draws the same numbers on all ranks, unless tokens are split.
    """

    def enter_at(self, places: Iterable[tuple[nn.Module, bool]]) -> None:
        """Enter at these modules: with the input of those that are members (True), with the output of the others."""
        for module, is_member in places:
            if is_member:
                module.register_forward_pre_hook(self._with_input)
            else:
                module.register_forward_hook(self._with_output)

    @override
    def _fork(self, *, once: bool = False) -> None:
        if not torch.compiler.is_compiling():
            self.context.random.drop(id(self))  # of a call that was cut short

    @override
    def _enter(self, x: Tensor) -> Tensor:
        length = None if self.sequence is None else self.sequence.length
        if self.sequence is None or length is None:
            return x
        self.sequence.expect(x, self.sequence.local, "a tensor-parallel region")
        return gather_sequence(x, self.context.channel, length)

    def _with_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self._entered(module, args[0]), *args[1:])

    def _with_output(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        return self._entered(module, out)

    def _entered(self, module: nn.Module, x: Any) -> Tensor:
        if not isinstance(x, Tensor):
            raise NotSupportedError(
                f"a {type(module).__name__}, at which a tensor-parallel region is entered, returns a "
                f"{type(x).__name__}; wanted one tensor. Correct enter= of the region in the policy"
            )
        if self.sequence is None or self.sequence.length is None:
            super()._fork(once=True)
        return copy_to_tp(x, self.context.channel) if torch.is_grad_enabled() else x
