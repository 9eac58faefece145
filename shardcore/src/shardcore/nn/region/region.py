"""Regions: the part of a block in which activations are split over ``tp``.

All column linears of a region, its *members*, share one *enter* (Megatron's *f*), so that a block costs one backward
all-reduce instead of one for each linear. In eager mode the weights of the members are inputs of *enter* too: a
member's backward only records its output gradient, and *enter*'s backward sums the input gradient of all members,
starts its all-reduce, computes the weight gradients meanwhile, and waits.

The open region is an attribute of the tensor that *enter* returns, and is freed with it; no module refers to it. A
member that is called with another tensor, as hooks on one rank may do, computes the same gradients without the overlap,
and the collectives are the same: *enter* sums nothing but the gradient of its input.
``torch.autograd.grad(..., entered)`` raises "not used in the graph"; differentiate with respect to the input of
*enter*. What was measured, and the variants that lost, are in ``docs/adr/0002-regions.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from shardcore._torch import backward_task
from shardcore.comm.collectives import Pending, refuse_double_backward
from shardcore.comm.dtensor_params import gathered_part, local_tensor, spec_of, with_spec
from shardcore.comm.gradients import Flow, GradPlacement
from shardcore.comm.sequence import all_gather_tokens, join_parts, start_reduce_scatter
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext
from shardcore.nn.arguments import Argument
from shardcore.nn.linear.functional import autocast, bias_gradient, cast, flat, product, weight_gradient
from shardcore.nn.linear.members import Member, Reading, read_together
from shardcore.nn.randomness import DropoutSites
from shardcore.nn.region.flow import has_entered
from shardcore.nn.replicated import Replicated
from shardcore.nn.sequence.shard import SequenceShard, enter_region
from shardcore.transfer.products import gather_products

#: On the tensor that enter returned: the open region, on which a member finds what it multiplies with by its id.
OPEN = "_shardcore_region"

_WHERE = "a tensor-parallel region"


class _Own(NamedTuple):
    """What this rank uses of a member's parameters while the region is open."""

    place: int  # of the weight among the parameters of the region; the bias has the next one
    weight: Tensor  # (out/tp, in)
    bias: Tensor | None
    transposed: bool  # the parameter is (in, out/tp)


class _Call(NamedTuple):
    """One call of a member, as its backward recorded it."""

    member: _Own
    grad: Tensor  # (..., out/tp)
    x: Tensor | None  # (..., in); None where enter gathers it again
    weight: Tensor  # (out/tp, in), in the dtype of the product


class _Open:
    """An open region: the backwards of its members record their calls here, and enter's backward uses them.

    It lives as long as the graph of one forward: enter's node refers to it, and so does the tensor that enter returned,
    on which members find it. Members are added in the forward, before the first of them is called. `_calls` is empty
    except between the backward of the first member and that of enter, which torch runs last; `_task` is the number of
    the backward that they belong to.
    """

    def __init__(self, context: ShardContext, members: Sequence[Member], *, again: bool = False) -> None:
        self.context = context
        self.again = again  # what members multiply is gathered again in the backward, not kept
        self.known = members  # those outside of the fast path too
        self.members: dict[int, _Own] = {}
        self.parameters: list[Tensor] = []  # of all members
        self.products: dict[int, Tensor] = {}  # by their places, what the entry multiplied while tokens travelled
        self.version = 0  # of what entered: who changes it in place makes another tensor
        self._calls: list[_Call] = []
        self._task: int | None = None
        for member in members:
            weight, bias = member._parameters.get("weight"), member._parameters.get("bias")
            part = None if weight is None else gathered_part(weight)
            if weight is None or part is None:
                continue  # a linear that FSDP2 wraps by itself is gathered in its call
            added = None if bias is None else gathered_part(bias)
            parameters: tuple[Tensor, ...] = (weight,) if bias is None else (weight, bias)
            if member.reading is not None:
                # The gradient of what was read together is a plain one: the node that read it sums and places it.
                parameters = member.reading.parameters
                part = local_tensor(parameters[0]).detach()
                added = None if bias is None else local_tensor(parameters[1]).detach()
            elif bias is not None and added is None:
                continue  # somebody put a plain tensor in its place, which the call refuses
            part = part.t() if member.transposed else part
            self.members[id(member)] = _Own(len(self.parameters), part, added, member.transposed)
            self.parameters += parameters

    def record(self, call: _Call) -> None:
        """Record a call for the backward of enter."""
        task = backward_task()
        if task != self._task:  # a backward that raised half-way left its calls behind
            self._task, self._calls = task, []
        self._calls.append(call)

    def pop(self) -> list[_Call]:
        """Return the calls of the backward that is running, and forget them."""
        calls, self._calls = self._calls, []
        return calls if self._task == backward_task() else []


_OF_TOKENS = Flow(GradPlacement.VARYING, GradPlacement.VARYING, parameters=1, group="region", edge="enters")


class _EnterRegion(Function):
    """Identity forward; backward: the all-reduce of the input gradient, beside all parameter gradients.

    Where the sequence is split (``length`` tokens): all-gather forward, reduce-scatter backward.
    """

    flow = Flow(
        GradPlacement.VARYING,
        GradPlacement.REPLICATE,
        parameters=1,
        group="region",
        of_tokens=_OF_TOKENS,
        edge="enters",
    )

    @staticmethod
    def forward(ctx: Any, region: _Open, length: int | None, x: Tensor, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.region, ctx.length, ctx.dtype = region, length, x.dtype
        if region.again:
            ctx.save_for_backward(x)
        context = region.context
        if length is None:
            return x.view_as(x)
        if not context.overlap:
            return all_gather_tokens(x, context.channel, length)
        linears = [(own.weight, own.bias) for own in region.members.values()]
        gathered, products = gather_products(x, linears, context.channel, length, context.overlap)
        places = (own.place for own in region.members.values())
        region.products = dict(zip(places, products, strict=True))
        return gathered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        refuse_double_backward()
        region: _Open = ctx.region
        calls = region.pop()
        needs = ctx.needs_input_grad  # of (region, length, x, *parameters)
        gathering = region.context.channel.start_all_gather(ctx.saved_tensors[0]) if region.again else None
        gx = _input_gradient(grads[0], calls, ctx.dtype) if needs[2] else None
        if gx is None:
            return None, None, None, *_parameter_gradients(region, calls, needs[3:], gathering, ctx.length)
        channel = region.context.channel.of_gradients
        sending = channel.start_all_reduce(gx) if ctx.length is None else start_reduce_scatter(gx, channel)
        finished = _parameter_gradients(region, calls, needs[3:], gathering, ctx.length)
        return None, None, sending.wait(), *finished


def _input_gradient(extra: Tensor | None, calls: Sequence[_Call], dtype: torch.dtype) -> Tensor | None:
    """Return the input gradients of all calls, and of other uses of the tensor, summed into a new tensor."""
    if not calls:
        return None if extra is None else extra.clone(memory_format=torch.contiguous_format)
    total = cast(calls[0].grad @ calls[0].weight, dtype)
    for call in calls[1:]:
        if dtype == call.grad.dtype:
            flat(total).addmm_(flat(call.grad), call.weight)
        else:
            total += call.grad @ call.weight
    return total if extra is None else total.add_(extra)


def _parameter_gradients(
    region: _Open, calls: Sequence[_Call], needed: Sequence[bool], gathering: Pending | None, length: int
) -> list[Tensor | None]:
    """Return the gradients of all parameters, summed over the calls, as DTensors."""
    grads: list[Tensor | None] = [None] * len(needed)
    gathered = None if gathering is None else join_parts(gathering.wait(), length)
    for member, grad, kept, weight in calls:
        i = member.place
        x = gathered if kept is None else kept
        if needed[i] and x is not None:
            own = weight_gradient(grad, cast(x, weight.dtype), member.weight.dtype, transposed=member.transposed)
            grads[i] = _plus(grads[i], own)
        if member.bias is not None and needed[i + 1]:
            grads[i + 1] = _plus(grads[i + 1], bias_gradient(grad, member.bias.dtype))
    return [None if g is None else with_spec(g, spec_of(p)) for g, p in zip(grads, region.parameters, strict=True)]


def _plus(total: Tensor | None, grad: Tensor) -> Tensor:
    return grad if total is None else total + grad


class MemberLinear(Function):
    """A member's product; its backward records (gradient, input, weight) for enter's backward."""

    flow = Flow(group="region")

    @staticmethod
    def forward(ctx: Any, region: _Open, member: _Own, x: Tensor) -> Tensor:
        """Return (..., out/tp) of (..., in)."""
        ctx.region, ctx.member = region, member
        weight, bias = member.weight, member.bias
        if torch.is_autocast_enabled(x.device.type):
            x, weight, bias = autocast(x, weight, bias)
        if region.again:
            ctx.save_for_backward(weight)
        else:
            ctx.save_for_backward(weight, x)
        if (ready := region.products.pop(member.place, None)) is not None:
            return ready
        return F.linear(x, weight) if bias is None else product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        """Record the call; the entry computes the gradients."""
        weight, *kept = ctx.saved_tensors
        # Detached: x leads to enter's node, which holds the region.
        ctx.region.record(_Call(ctx.member, grads[0], kept[0].detach() if kept else None, weight))
        return None, None, None


def require_entered(member: Member, x: Tensor) -> None:
    """Refuse ``x``, which a member is called with, if it needs a gradient and did not come in through an entry.

    The entry is a hook on the call of a module. Whoever calls that module's ``forward``, or the member by itself,
    bypasses it: the output is right, but the gradient of the input is partial.
    """
    # The graph of what a reentrant checkpoint recomputes begins inside of the region.
    if not x.requires_grad or hasattr(x, OPEN) or backward_task() != -1:
        return
    if not has_entered(x, lambda node: any(known is member for known in node.region.known)):
        raise NotSupportedError(
            f"a {type(member).__name__} ({member.in_features} to {member.out_features} features) inside of a "
            "tensor-parallel region was called with a tensor that did not enter it: each rank would have a summand of "
            "its gradient. Call the block, or the attention or MLP in it, as a module: layer.mlp(x), not "
            "layer.mlp.forward(x), nor the linear by itself. Without gradients (torch.no_grad(), a detached tensor) it "
            "returns this rank's part."
        )


class Region:
    """The entry of one region in one block: a forward pre-hook on the module where the activations enter.

    Args:
        context: of the sharded model.
        argument: name of the argument of the module's ``forward`` that enters, and its position.
        members: the column linears that share the entry.
        dropouts: where numbers may be drawn for split activations; None if no row linear ends the region. From entry to
            row linear the random stream is forked: always in eager mode; in compiled code, where forking breaks the
            graph, only while a dropout at one of the places is active.
        beside: modules inside of the region whose gradients are partial, and are summed with those of the members.
    """

    def __init__(
        self,
        context: ShardContext,
        argument: tuple[str, int],
        members: Sequence[Member],
        dropouts: DropoutSites | None,
        beside: Sequence[Replicated] = (),
    ) -> None:
        self.context = context
        self.members = list(members)
        self._sharing = [member for member in self.members if not member.uses_what_it_holds]
        self._beside = list(beside)
        #: Set where the activations outside are split along the sequence.
        self.sequence: SequenceShard | None = None
        self._argument = Argument(*argument)
        self._dropouts = dropouts
        #: Set while the stream is forked by an entry in eager mode; the row linear may be in a compiled graph.
        self._is_forked = False

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, one of which has entered the region."""
        if (self._sharing or self._beside) and not torch.compiler.is_compiling():
            self._read()
        length = None if self.sequence is None else self.sequence.length
        if length is None:
            self._fork()  # where tokens are split, the whole block is forked
            if not torch.is_grad_enabled():
                return args, kwargs  # nothing to sum
        return self._argument.changed(args, kwargs, self._enter)

    def _read(self) -> None:
        ready = [member for member in self._sharing if gathered_part(member.weight) is not None]
        beside = [m for m in self._beside if all(gathered_part(p) is not None for p in m._shard_parameters)]
        others = [m._shard_parameters for m in beside]
        found = read_together(self.context, ready, others)
        for member, parameters in zip(ready, found, strict=False):
            member.reading = Reading(member.own_parameters, parameters)
        for module, own, parameters in zip(beside, others, found[len(ready) :], strict=True):
            module.__dict__["_shard_reading"] = Reading(own, parameters)

    def leave(self) -> None:
        """End the region, as the row linear does: from here on all ranks draw the same random numbers again."""
        if not torch.compiler.is_compiling():
            for member in self._sharing:
                member.reading = None
            for module in self._beside:
                module.__dict__["_shard_reading"] = None
        elif not (self._is_forked or (self._dropouts is not None and self._dropouts.live())):
            return
        self._is_forked = False
        self.context.random.join(id(self))

    def _fork(self, *, once: bool = False) -> None:
        if self._dropouts is None:
            return
        random, compiling = self.context.random, torch.compiler.is_compiling()
        # In eager mode what draws numbers inside need not be known. Outside of the stream the user's generators would
        # move on.
        live = (not compiling and random.in_use) or self._dropouts.live()
        if not compiling:
            self._is_forked = live
        if live:
            random.fork(id(self), once=once)
        elif not compiling:
            random.drop(id(self))

    def _enter(self, x: Tensor) -> Tensor:
        context, tokens = self.context, self.sequence
        # A compiled graph cannot hold what the fast path keeps in Python.
        if not context.fuses_regions or torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return enter_region(x, context.channel, tokens, _WHERE)
        length = None if tokens is None else tokens.length
        if tokens is not None and length is not None:
            tokens.expect(x, tokens.local, _WHERE)
        region = _Open(context, self.members, again=length is not None and not context.keeps_gathered)
        new = _EnterRegion.apply(region, length, x, *region.parameters)  # type: ignore[no-untyped-call]
        setattr(new, OPEN, region)
        region.version = new._version
        return new  # type: ignore[no-any-return]  # Function.apply is untyped
