"""How modules read DTensor parameters as plain local tensors, with gradients that are DTensors again.

`DTensor.to_local()` in the graph costs about 100 us per parameter, forward and backward, on the host. Here one autograd
function reads all parameters of a module at once and wraps their gradients directly. This is the only module that
touches a DTensor's internals (`_local_tensor`, `_spec` and the wrapping constructor).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.tensor import DTensor, Partial
from torch.nn import Parameter

from shardcore._torch import CAN_TRACE, DTensorSpec
from shardcore.comm.collectives import Channel, refuse_double_backward
from shardcore.comm.gradients import Flow, GradPlacement, owned, traced_owned
from shardcore.errors import WrapError


@overload
def spec_of(parameter: DTensor) -> DTensorSpec: ...


@overload
def spec_of(parameter: Tensor) -> DTensorSpec | None: ...


def spec_of(parameter: Tensor) -> DTensorSpec | None:
    """Return the DTensor spec of a parameter, or None for a plain tensor."""
    return getattr(parameter, "_spec", None)


def splits_on_tp(parameter: DTensor) -> bool:
    """Tell whether the ranks of ``tp`` have parts of a parameter, whatever those of other axes have."""
    names = parameter.device_mesh.mesh_dim_names or ()
    placed = zip(itertools.chain(names, itertools.repeat("tp")), parameter.placements, strict=False)
    return any(axis != "ep" and not placement.is_replicate() for axis, placement in placed)


def local_tensor(parameter: Tensor) -> Tensor:
    """Return this rank's part of a DTensor without a graph node (a plain tensor is returned as it is)."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def is_packed(tensor: Tensor) -> bool:
    """Tell whether a tensor is, or has as its part, one of a client's class for packed (quantized) values."""
    return getattr(type(local_tensor(tensor)), "shardcore_packed", False)


def in_memory(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor; of a packed one, what it is packed in: that has an address."""
    local: Any = local_tensor(tensor)
    return getattr(local, local.__tensor_flatten__()[0][0]) if is_packed(local) else local  # type: ignore[no-any-return]


def gathered_part(parameter: Tensor) -> Tensor | None:
    """Return this rank's part along ``tp`` without a graph; None where FSDP2 has not gathered it."""
    spec = getattr(parameter, "_spec", None)
    if spec is None or spec.mesh.ndim != 1:
        return None
    part: Tensor = parameter._local_tensor  # type: ignore[attr-defined]  # it has a spec
    return part.detach() if part.requires_grad else part


def expect_dtensor(parameter: Tensor) -> Tensor:
    """Return a parameter of which this rank holds a part; raise if somebody put a whole tensor in its place."""
    if torch.compiler.is_compiling():
        return parameter
    if not isinstance(parameter, DTensor):
        kind = "a plain tensor" if type(parameter) in (Tensor, Parameter) else f"a {type(parameter).__name__}"
        raise WrapError(
            f"a tensor-parallel module holds {kind} {tuple(parameter.shape)} where its DTensor parameter was: "
            "load_state_dict(assign=True), torch.func.functional_call with whole tensors, and a library that puts "
            "tensors of its own there (to quantize, say) cannot work. load_state_dict(state) without assign splits "
            "whole tensors, which every rank has to pass; to quantize a model, save it and load it unsharded."
        )
    return parameter


def as_dtensor(tensor: DTensor) -> DTensor:
    """Return a DTensor of a subclass as one of torch's own, with the same part and without a graph."""
    return DTensor.__new__(DTensor, tensor._local_tensor, tensor._spec, requires_grad=tensor.requires_grad)


def with_spec(local: Tensor, spec: DTensorSpec | None) -> Tensor:
    """Wrap a local gradient in the spec of its parameter; with ``None`` return it unchanged.

    Nobody else may hold the storage of ``local``: see `shardcore.comm.gradients`.
    """
    if spec is None:
        return local
    # The strides of the spec are what accumulation in place and fused optimizers trust, they never look at the local
    # part; and a wrapper with a storage offset, which it takes from the part, cannot be deep-copied.
    if not local.is_contiguous() or local.storage_offset():
        local = local.clone(memory_format=torch.contiguous_format)
    # The public from_local ends here at ten times the cost; DTensor.__init__ adds nothing but a Dynamo guard (5 us).
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


def by_dtype(tensors: Sequence[Tensor | None]) -> Iterator[list[int]]:
    """Yield the places of the tensors of each dtype, in the order of the first of each."""
    for dtype in dict.fromkeys(t.dtype for t in tensors if t is not None):
        yield [i for i, t in enumerate(tensors) if t is not None and t.dtype == dtype]


def all_reduce_bucket(tensors: list[Tensor], channel: Channel) -> list[Tensor]:
    """Sum several tensors over the ranks, exactly, with one collective for each dtype.

    What it returns shares no storage, neither with the ``tensors`` nor among itself.
    """
    summed: list[Tensor] = list(tensors)
    for places in by_dtype(tensors):
        bucket = channel.exact.all_reduce(torch.cat([tensors[i].reshape(-1) for i in places]))
        parts = bucket.split([tensors[i].numel() for i in places])
        for i, part in zip(places, parts, strict=True):
            summed[i] = (part if len(parts) == 1 else part.clone()).view(tensors[i].shape)
    return summed


class _ReadLocal(Function):
    flow = Flow(one_to_one=True)

    @staticmethod
    def forward(ctx: Any, fresh: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.fresh = fresh
        ctx.specs, parts = [], []
        for parameter in parameters:  # on the way of every norm: a comprehension would be a call more
            ctx.specs.append(getattr(parameter, "_spec", None))
            parts.append(getattr(parameter, "_local_tensor", parameter).detach())
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        own = [g if g is None or ctx.fresh else owned(g) for g in grads]
        return (None, *(None if g is None else with_spec(g, s) for g, s in zip(own, ctx.specs, strict=True)))


class _ReadPartial(Function):
    flow = Flow(GradPlacement.VARYING, GradPlacement.REPLICATE, one_to_one=True)

    @staticmethod
    def forward(ctx: Any, channel: Channel, deferred: bool, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.channel, ctx.deferred = channel, deferred
        ctx.specs = [spec_of(p) for p in parameters]
        return tuple(local_tensor(p).detach() for p in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        own = {i: g for i, g in enumerate(grads) if g is not None}
        parts = map(owned, own.values()) if ctx.deferred else all_reduce_bucket(list(own.values()), ctx.channel)
        out: list[Tensor | None] = [None] * len(grads)
        for i, part in zip(own, parts, strict=True):
            spec = ctx.specs[i]
            if ctx.deferred and spec is not None:  # every rank has its summand
                spec = DTensorSpec(spec.mesh, (Partial(),), tensor_meta=spec.tensor_meta)
            out[i] = with_spec(part, spec)
        return None, None, *out


class _CompiledPartial(Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, channel: Channel) -> Tensor:
        ctx.channel = channel
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.channel.exact.all_reduce(grads[0].contiguous()), None


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _read_untraced(*parameters: Tensor, fresh: bool) -> tuple[Tensor, ...]:
    return read_local(*parameters, fresh=fresh)


def read_local(*parameters: Tensor, fresh: bool = False) -> tuple[Tensor, ...]:
    """Return this rank's parts of DTensor parameters; their gradients are DTensors with the parameters' specs.

    Plain tensors pass unchanged. ``fresh``: what is computed with the parts makes a new tensor for each gradient (a
    product, a lookup), and so they are not copied.
    """
    if torch.compiler.is_compiling():
        if not CAN_TRACE:
            return _read_untraced(*parameters, fresh=fresh)  # type: ignore[no-any-return]  # breaks the graph
        return tuple(_traced(p, fresh=fresh) if isinstance(p, DTensor) else p for p in parameters)
    if not torch.is_grad_enabled():
        return tuple(local_tensor(p) for p in parameters)
    return _ReadLocal.apply(fresh, *parameters)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch


def _traced(parameter: DTensor, *, fresh: bool) -> Tensor:
    local: Tensor = parameter.to_local()
    return local if fresh else traced_owned(local)


def read_partial(channel: Channel, *parameters: Tensor, deferred: bool = False) -> tuple[Tensor, ...]:
    """Read replicated parameters whose gradient on each rank is only a summand.

    The summands of all ``parameters`` are added up in one collective inside the backward, so that each backward of an
    accumulation contributes exactly once; ``deferred`` leaves the gradients partial DTensors, for
    `shardcore.reduce_partial_gradients`.

    Raises:
        WrapError: gradients are deferred, and one of ``parameters`` that needs one is a plain tensor, which cannot say
            that its gradient is partial. (To sum it at once would be a collective that other ranks may not make.)
    """
    if torch.compiler.is_compiling():
        # Owned after the sum: the compiler makes one of two sums of one tensor.
        return tuple(_CompiledPartial.apply(p, channel) for p in read_local(*parameters))  # type: ignore[no-untyped-call]
    if not torch.is_grad_enabled():
        return tuple(local_tensor(p) for p in parameters)
    for parameter in parameters if deferred else ():
        if parameter.requires_grad:
            expect_dtensor(parameter)
    return _ReadPartial.apply(channel, deferred, *parameters)  # type: ignore[no-untyped-call, no-any-return]  # untyped in torch
