"""Regions: the part of a block in which activations are split over ``tp``.

All column linears of a region share one *enter* (Megatron's *f*), so that a block costs one backward all-reduce instead
of one for each linear. In eager mode *enter* also takes the weights of its members: a member's backward only leaves its
output gradient behind, and *enter*'s backward sums the input gradient of all members, starts its all-reduce, computes
the weight gradients meanwhile, and waits.

The running region hangs on the tensor that *enter* returns and dies with it; no module holds any of it. A member that
is called with another tensor computes the same gradients, without the overlap. The entered tensor itself has no
gradient to ask for: torch says that it is not used. What was measured, and the variants that lost, are in
``docs/adr/0002-regions.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from shardcore.comm.collectives import copy_to_tp, refuse_double_backward
from shardcore.comm.reads import finish_partial, local_tensor, spec_of, with_spec
from shardcore.comm.strided import Runs
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext
from shardcore.nn.dropout import DropoutSites
from shardcore.nn.functional import autocast_dtype, bias_gradient, cast, flat, weight_gradient

if TYPE_CHECKING:
    from shardcore.nn.linear import ColumnLinear

__all__ = ["Region", "deferred_linear", "entered", "take_rows"]

_OPEN = "_shardcore_region"  # on the tensor that enter returned: the open region
_MEMO = "_shardcore_entered"  # on a tensor that was entered by its linears: its entered form


class _Call(NamedTuple):
    """One call of a member, as its backward left it."""

    place: int  # of the member's weight among the parameters of enter
    grad: Tensor  # (..., out/tp)
    x: Tensor  # (..., in)
    weight: Tensor  # (out/tp, in)
    task: int  # the backward it belongs to


class _Member(NamedTuple):
    """What a member needs while the region is open."""

    place: int
    weight: Tensor
    bias: Tensor | None


class _Open(NamedTuple):
    """An open region: calls fill up during the backward and are emptied by enter's."""

    members: dict[int, _Member]
    calls: list[_Call]


def take_rows(held: Tensor, rows: Runs) -> Tensor:
    """Return the runs ``rows`` of ``held``, one after the other: a view if there is one run only."""
    parts = [held[start:stop] for start, stop in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class _Read(NamedTuple):
    """How enter reads one parameter: whole, or the rows that this rank needs of what all ranks hold."""

    rows: Runs | None

    def take(self, local: Tensor) -> Tensor:
        return local.detach() if self.rows is None else take_rows(local.detach(), self.rows)

    def put(self, grad: Tensor, shape: torch.Size) -> Tensor:
        if self.rows is None:
            return grad
        whole = grad.new_zeros(shape)
        parts = grad.split([stop - start for start, stop in self.rows])
        for (start, stop), part in zip(self.rows, parts, strict=True):
            whole[start:stop] = part
        return whole


class _Enter(Function):
    """Identity forward; backward: the all-reduce of the input gradient beside the weight gradients of all members."""

    @staticmethod
    def forward(
        ctx: Any, context: ShardContext, calls: list[_Call], reads: list[_Read], x: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.context, ctx.calls, ctx.reads = context, calls, reads
        ctx.x_dtype = x.dtype
        locals_ = [local_tensor(p) for p in parameters]
        ctx.specs = [spec_of(p) for p in parameters]
        ctx.shapes = [(p.shape, p.dtype) for p in locals_]
        return x.view_as(x), *(read.take(p) for read, p in zip(reads, locals_, strict=True))

    @staticmethod
    def backward(ctx: Any, gx: Tensor | None, *parameter_grads: Tensor | None) -> tuple[Any, ...]:
        refuse_double_backward()
        # A backward that raised half-way leaves calls behind: they belong to no other.
        task = _backward_task()
        calls = [call for call in ctx.calls if call.task == task]
        ctx.calls.clear()
        work = None
        if ctx.needs_input_grad[3]:
            gx = _input_gradient(gx, calls, ctx.x_dtype)
            if gx is not None:
                work = dist.all_reduce(gx, group=ctx.context.group, async_op=True)
        grads = list(parameter_grads)  # of biases; those of weights come from the calls
        for call in calls:
            if ctx.needs_input_grad[4 + call.place]:
                grad = weight_gradient(call.grad, call.x, ctx.shapes[call.place][1])
                before = grads[call.place]
                grads[call.place] = grad if before is None else before + grad
        finished = _finish(grads, ctx)
        if work is not None:
            work.wait()
        return None, None, None, gx, *finished


def _input_gradient(extra: Tensor | None, calls: Sequence[_Call], dtype: torch.dtype) -> Tensor | None:
    """Sum the input gradients of all calls, and of whoever else used the tensor, into a tensor of its own."""
    total: Tensor | None = None
    for call in calls:
        grad = flat(call.grad)
        if total is None:
            total = cast(grad @ call.weight, dtype)
        elif total.dtype == grad.dtype:
            total.addmm_(grad, call.weight)
        else:
            total += grad @ call.weight
    if total is None:
        return None if extra is None else extra.clone(memory_format=torch.contiguous_format)
    total = total.view(calls[0].x.shape)
    return total if extra is None else total.add_(extra)


def _finish(grads: list[Tensor | None], ctx: Any) -> list[Tensor | None]:
    """Wrap finished gradients, and sum those of parameters that all ranks hold and each reads in part."""
    out: list[Tensor | None] = list(grads)
    partial = []
    for i, grad in enumerate(grads):
        if grad is None or not ctx.needs_input_grad[4 + i]:
            out[i] = None
        elif ctx.reads[i].rows is None:
            out[i] = with_spec(grad, ctx.specs[i])
        else:
            partial.append(i)
    if partial:
        whole = [ctx.reads[i].put(grads[i], ctx.shapes[i][0]) for i in partial]
        summed = finish_partial(whole, [ctx.specs[i] for i in partial], ctx.context)
        for i, grad in zip(partial, summed, strict=True):
            out[i] = grad
    return out


class _Deferred(Function):
    """A member's product; its backward leaves (gradient, input, weight) for enter's."""

    @staticmethod
    def forward(ctx: Any, calls: list[_Call], place: int, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = autocast_dtype(x)
        ctx.calls, ctx.place = calls, place
        ctx.bias_dtype = None if bias is None else bias.dtype
        x, weight = cast(x, dtype), cast(weight, dtype)
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, None if bias is None else cast(bias, dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None, None, Tensor | None]:
        refuse_double_backward()
        (grad,) = grads
        x, weight = ctx.saved_tensors
        bias = bias_gradient(grad, ctx.bias_dtype) if ctx.needs_input_grad[4] else None
        # Detached: x leads to enter's node, which holds the calls.
        ctx.calls.append(_Call(ctx.place, grad, x.detach(), weight.detach(), _backward_task()))
        return None, None, None, None, bias


def _backward_task() -> int:
    """Return the number of the backward that is running; torch has no public name for it."""
    return torch._C._current_graph_task_id()


def deferred_linear(member: ColumnLinear, x: Tensor) -> Tensor | None:
    """Compute a member inside the open region of ``x``, or return None if ``x`` carries none that knows it."""
    region: _Open | None = getattr(x, _OPEN, None)
    if region is None or (found := region.members.get(id(member))) is None:
        return None
    out: Tensor = _Deferred.apply(region.calls, found.place, x, found.weight, found.bias)  # type: ignore[no-untyped-call]
    return out


def entered(x: Tensor, context: ShardContext) -> Tensor:
    """Enter with ``x`` once, no matter how many column linears are called with it (eager mode, grad enabled).

    The entered form is remembered on ``x`` itself, weakly: the graphs of the linears keep it alive.
    """
    if not x.requires_grad or hasattr(x, _OPEN):
        return x  # nothing to sum, or entered already
    memo = getattr(x, _MEMO, None)
    if memo is not None:
        reference, version, group = memo
        known = reference()
        if known is not None and version == x._version and group == context.group.group_name:
            return known  # type: ignore[no-any-return]  # an attribute of a tensor has no type
    new = copy_to_tp(x, context.group)
    setattr(x, _MEMO, (_TensorReference(new), x._version, context.group.group_name))
    return new


class _TensorReference:
    """A weak reference to a tensor that copies to nothing, so that tensors carrying one can be deep-copied."""

    def __init__(self, tensor: Tensor | None) -> None:
        import weakref

        self._reference = None if tensor is None else weakref.ref(tensor)

    def __call__(self) -> Tensor | None:
        return None if self._reference is None else self._reference()

    def __deepcopy__(self, memo: dict[int, Any]) -> _TensorReference:
        return _TensorReference(None)

    def __reduce__(self) -> tuple[type[_TensorReference], tuple[None]]:
        return _TensorReference, (None,)


class Region:
    """The entry of one region in one block: a forward pre-hook on the module where the activations enter.

    Args:
        context: of the sharded model.
        argument: name of the entering argument of the module's ``forward``, and its position.
        members: the column linears that share the enter.
        dropouts: dropouts that may run on split activations; while one of them is live, the random stream is forked
            from the entry to the row linear.
    """

    def __init__(
        self,
        context: ShardContext,
        argument: tuple[str, int],
        members: Sequence[ColumnLinear],
        dropouts: DropoutSites,
    ) -> None:
        self.context = context
        self.members = list(members)
        self._name, self._position = argument
        self._dropouts = dropouts

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Enter: return the arguments with the entering one in its region."""
        self._fork()
        if not torch.is_grad_enabled():
            return args, kwargs
        self._refuse_others(module, args, kwargs)
        if self._name in kwargs:
            return args, {**kwargs, self._name: self._enter(kwargs[self._name])}
        if self._position >= len(args):
            raise TypeError(
                f"{type(module).__name__}.forward was called without the argument {self._name!r}, which enters its "
                f"tensor-parallel region; got {len(args)} positional arguments and {sorted(kwargs)}"
            )
        place = self._position
        return (*args[:place], self._enter(args[place]), *args[place + 1 :]), kwargs

    def _refuse_others(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse any other argument that needs a gradient: each rank would have a summand of it."""
        named = [(f"at position {i}", v) for i, v in enumerate(args) if i != self._position or self._name in kwargs]
        named += [(repr(name), v) for name, v in kwargs.items() if name != self._name]
        for name, value in named:
            values = value if isinstance(value, tuple | list) else (value,)
            if any(isinstance(v, Tensor) and v.requires_grad for v in values):
                raise NotSupportedError(
                    f"{type(module).__name__}: the argument {name} needs a gradient, but only {self._name!r} enters "
                    "its tensor-parallel region: the gradient of another would be this rank's summand. Detach it, "
                    "or keep this module unsharded."
                )

    def leave(self) -> None:
        """Called by the row linear: numbers drawn from here on agree on all ranks again."""
        if torch.compiler.is_compiling() and not self._dropouts.live():
            return
        _join(self)

    def _fork(self) -> None:
        if self._dropouts.live():
            _fork(self)
        elif not torch.compiler.is_compiling():
            self.context.random.drop(id(self))

    def _enter(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return copy_to_tp(x, self.context.group)
        parameters: list[Tensor] = []
        reads: list[_Read] = []
        places: list[tuple[ColumnLinear, int, bool]] = []
        for member in self.members:
            weight, bias = member.weight, member.bias
            # FSDP2 on the linear itself has not gathered it yet: it will run outside the fast path.
            if (spec := spec_of(weight)) is None or spec.mesh.ndim != 1:
                continue
            places.append((member, len(parameters), bias is not None))
            parameters += [weight] if bias is None else [weight, bias]
            reads += [_Read(member.rows)] if bias is None else [_Read(member.rows), _Read(member.bias_rows)]
        calls: list[_Call] = []
        new, *locals_ = _Enter.apply(self.context, calls, reads, x, *parameters)  # type: ignore[no-untyped-call]
        members = {id(m): _Member(i, locals_[i], locals_[i + 1] if has_bias else None) for m, i, has_bias in places}
        setattr(new, _OPEN, _Open(members, calls))
        return new  # type: ignore[no-any-return]  # Function.apply is untyped


# Generator states cannot be traced: these two are the only graph breaks, and only where a dropout is live.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _fork(region: Region) -> None:
    region.context.random.fork(id(region))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _join(region: Region) -> None:
    region.context.random.join(id(region))
