"""`ColoTensor`: this rank's part of a tensor, which computes as the whole.

As a torch tensor it *is* the part: storage, gradient and autograd history are the part's. An operation makes DTensors
of its arguments and takes their parts back: what may be computed, and by which collectives, is DTensor's to say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, Self

import torch
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils import swap_tensors
from torch.utils._pytree import tree_leaves, tree_map_only

from shardcore.errors import ConfigError, NotSupportedError
from shardcore_shardformer.tensor.specs import (
    ColoTensorSpec,
    ComputeSpec,
    ProcessGroup,
    ReplicaSpec,
    ShardSpec,
    placement_of,
)

#: Properties that are operations; the others are the part's.
_COMPUTED = frozenset(("T", "mT", "H", "mH", "real", "imag"))
#: What a part answers by itself.
_OF_THE_PART = frozenset((
    "backward", "data_ptr", "detach_", "dim", "element_size", "get_device", "is_complex", "is_floating_point",
    "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "untyped_storage",
    "__format__", "__hash__",
))  # fmt: skip
#: What DTensor computes of a divided tensor as of the whole, with its gradient. Of other operations torch 2.13 gets
#: some wrong, such as the gradients of ``mse_loss`` and ``amin``.
SERVED = frozenset((
    "T", "mT", "t", "transpose", "permute", "unsqueeze", "size", "numel", "__len__", "clone", "detach",
    "contiguous", "to", "double", "float", "half", "bfloat16", "zeros_like", "ones_like", "abs", "neg", "exp", "log",
    "log1p", "sqrt", "rsqrt", "square", "reciprocal", "sign", "sin", "cos", "tanh", "erf", "sigmoid", "relu",
    "gelu", "silu", "leaky_relu", "softplus", "clamp", "add", "sub", "__rsub__", "mul", "div", "__rdiv__",
    "pow", "maximum", "minimum", "where", "masked_fill", "lerp", "addcmul", "addcdiv", "eq", "__eq__", "ne",
    "lt", "le", "gt", "ge", "sum", "mean", "var", "logsumexp", "softmax", "log_softmax", "norm",
    "linalg_vector_norm", "any", "all", "linear", "embedding", "addmm", "mm", "matmul",
    "layer_norm", "_foreach_norm",
))  # fmt: skip
#: The same in place, where autograd does not record.
SERVED_IN_PLACE = frozenset((
    "add_", "sub_", "mul_", "div_", "neg_", "lerp_", "addcmul_", "addcdiv_", "copy_", "zero_", "fill_", "sqrt_",
    "clamp_", "_foreach_mul_",
))  # fmt: skip
#: What a layer computes with its weight.
_LAYERS = frozenset(("linear", "embedding", "addmm", "mm", "matmul"))


class ColoTensor(torch.Tensor):
    """This rank's part of a tensor, which computes as the whole tensor does.

    After ColossalAI's ``ColoTensor``. ``shape``, ``data`` and printing are the part's, as there; ``size()`` and
    ``numel()`` are the whole's, and so is what every operation computes. A plain tensor beside it is the same on all
    ranks. Gradients are ColoTensors too. They are not averaged over replicas: do so over ``pg.dp_process_group()``.

    ``ColoTensor(data, spec)`` is of this rank's part ``data``, a plain tensor (the whole with `ReplicaSpec`), and of
    ``spec``, which says how the whole is divided. Nothing is sent: the parts of a group's ranks have to be of one shape
    and dtype, as for ``DTensor.from_local``.

    Attributes:
        process_group: among whom.
        dist_spec: how; its dimension counts from the front.
        compute_spec: what layers make of it, or None; may be set.

    Raises:
        ConfigError: ``data`` is no plain tensor on the device of ``spec``'s ranks, or has no such dimension.
    """

    process_group: ProcessGroup
    dist_spec: ShardSpec | ReplicaSpec
    compute_spec: ComputeSpec | None

    def __new__(cls, data: torch.Tensor, spec: ColoTensorSpec) -> Self:
        """Return ``data`` with what it is a part of; they share memory and autograd's history."""
        if not isinstance(data, torch.Tensor) or isinstance(data, ColoTensor | DTensor):
            raise ConfigError(f"{cls.__name__} wants this rank's part as a plain tensor, got {type(data).__name__}")
        if not isinstance(spec, ColoTensorSpec):
            raise ConfigError(f"{cls.__name__}(spec={spec!r}); wanted a ColoTensorSpec")
        if data.device.type != (wanted := spec.pg.mesh.device_type):
            raise ConfigError(
                f"{cls.__name__} got a part on {data.device.type}; ranks meet on {wanted}: data.to({wanted!r})"
            )
        placement_of(spec.dist_attr, _whole_shape(data.shape, spec.dist_attr))
        return cls._made(data, spec)

    @classmethod
    def _made(cls, part: torch.Tensor, spec: ColoTensorSpec) -> Self:
        made = part.as_subclass(cls)
        made.process_group, made.compute_spec = spec.pg, spec.compute_attr
        made.dist_spec = _dist_spec(placement_of(spec.dist_attr, _whole_shape(part.shape, spec.dist_attr)), spec.pg)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @staticmethod
    def from_torch_tensor(tensor: torch.Tensor, spec: ColoTensorSpec) -> ColoTensor:
        """Return ``ColoTensor(tensor, spec)``."""
        return ColoTensor(tensor, spec)

    def size_global(self) -> torch.Size:
        """Return the shape of the whole."""
        return _whole_shape(self.shape, self.dist_spec)

    def is_replicate(self) -> bool:
        """Tell whether every rank has the whole."""
        return isinstance(self.dist_spec, ReplicaSpec)

    def redistribute(self, dist_spec: ShardSpec | ReplicaSpec) -> ColoTensor:
        """Return the same whole, divided by ``dist_spec``; autograd records it.

        Raises:
            ConfigError: the tensor cannot be divided so.
        """
        spec = ColoTensorSpec(self.process_group, dist_spec, self.compute_spec)
        placement = placement_of(dist_spec, self.size_global())
        return ColoTensor._made(
            _dtensor(self.process_group, self).redistribute(placements=[placement]).to_local(), spec
        )

    def to_replicate(self) -> ColoTensor:
        """Return the whole on every rank; autograd records it."""
        return self.redistribute(ReplicaSpec())

    def set_dist_spec(self, dist_spec: ShardSpec | ReplicaSpec) -> None:
        """Divide this tensor by ``dist_spec``, in place; autograd records it.

        A leaf stays a leaf, and its gradient is divided with it.

        Raises:
            ConfigError: the tensor cannot be divided so.
            NotSupportedError: the result of an operation is to keep its gradient (``retain_grad``).
        """
        if not self.is_leaf:
            if self.retains_grad:
                raise NotSupportedError(
                    "set_dist_spec of a tensor with retain_grad(); call retain_grad() behind it, or use redistribute"
                )
            with torch.enable_grad():
                swap_tensors(self, self.redistribute(dist_spec))
            return
        with torch.no_grad():
            made = self.redistribute(dist_spec)
            old = self.grad
            grad = old.redistribute(dist_spec).data if isinstance(old, ColoTensor) else None
            self.grad = None
            self.data = made.data
            self.dist_spec = made.dist_spec
            self.grad = grad
        if self.requires_grad:
            if (guard := vars(self).get("_guard")) is not None:
                guard.remove()
            self._guard = self.register_hook(functools.partial(_same_division, made.shape, self.dist_spec))  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Compute with the wholes, or let the part answer.

        Raises:
            ConfigError: tensors of several process groups.
            NotSupportedError: it is not known that parts compute it as the whole does.
        """
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in ("__get__", "__set__", "__delete__"):
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in _COMPUTED:
                value = _of_part(func, *args, **kwargs)
                return (
                    ColoTensor._made(value, _spec(args[0])) if name == "grad" and type(value) is torch.Tensor else value
                )
        found = [value for value in tree_leaves((args, kwargs)) if isinstance(value, ColoTensor)]
        group = found[0].process_group
        if any(tensor.process_group != group for tensor in found):
            raise ConfigError(f"{name} of ColoTensors of several process groups; make them with one ProcessGroup")
        if name in _OF_THE_PART:
            return _of_part(func, *args, **kwargs)
        if all(tensor.is_replicate() for tensor in found):
            # What ranks compute of the same is the same. Autograd keeps aliases, which set_dist_spec leaves alone.
            parts = tree_map_only(ColoTensor, _plain, (args, kwargs))
            result = func(*parts[0], **parts[1])
            if args and result is parts[0][0]:
                return args[0]
            return tree_map_only(torch.Tensor, functools.partial(_part, group), result)
        _refuse(name, args, kwargs)
        wholes = tree_map_only(torch.Tensor, functools.partial(_dtensor, group), (args, kwargs))
        result = func(*wholes[0], **wholes[1])
        if name in SERVED_IN_PLACE:
            return args[0]
        layer = next((t.compute_spec for t in found if t.compute_spec is not None), None) if name in _LAYERS else None
        to_whole = layer is not None and layer.output_replicate
        return tree_map_only(DTensor, functools.partial(_part, group, to_whole=to_whole), result)

    def __deepcopy__(self, memo: dict[int, Any]) -> ColoTensor:
        if not self.is_leaf:
            raise NotSupportedError("deepcopy of a ColoTensor that was computed; copy t.detach()")
        if id(self) not in memo:
            copied: ColoTensor = _of_part(lambda: self.detach().clone().as_subclass(type(self)))
            copied.__dict__.update({name: value for name, value in vars(self).items() if name != "_guard"})
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        made: ColoTensor = memo[id(self)]
        return made

    def __reduce_ex__(self, _: Any) -> NoReturn:
        raise NotSupportedError("a ColoTensor is not saved with its process group; save t.to_replicate().data")

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.data!r}, {self.dist_spec}, {self.process_group})"


class ColoParameter(ColoTensor, torch.nn.Parameter):
    """A `ColoTensor` that is a parameter of a module: ``ColoParameter(data, requires_grad=True, *, spec)``.

    Raises:
        ConfigError: as `ColoTensor`.
    """

    def __new__(cls, data: torch.Tensor, requires_grad: bool = True, *, spec: ColoTensorSpec) -> Self:
        """Return a leaf that shares ``data``'s memory."""
        plain = isinstance(data, torch.Tensor) and not isinstance(data, ColoTensor)
        made = super().__new__(cls, data.detach() if plain else data, spec)
        made.requires_grad_(requires_grad)
        return made

    @staticmethod
    def from_torch_tensor(tensor: torch.Tensor, requires_grad: bool = True, *, spec: ColoTensorSpec) -> ColoParameter:  # type: ignore[override]
        """Return ``ColoParameter(tensor, requires_grad, spec=spec)``."""
        return ColoParameter(tensor, requires_grad, spec=spec)


def _of_part(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``func`` where a ColoTensor is a torch tensor as any other."""
    return torch.Tensor.__torch_function__(func, (), args, kwargs)  # type: ignore[no-untyped-call]


def _plain(tensor: ColoTensor) -> torch.Tensor:
    part: torch.Tensor = _of_part(torch.Tensor.as_subclass, tensor, torch.Tensor)
    return part


def _spec(tensor: ColoTensor) -> ColoTensorSpec:
    return ColoTensorSpec(tensor.process_group, tensor.dist_spec, None)


def _whole_shape(part: torch.Size, dist_spec: ShardSpec | ReplicaSpec) -> torch.Size:
    sizes = list(part)
    if isinstance(dist_spec, ShardSpec) and -len(sizes) <= dist_spec.dims[0] < len(sizes):
        sizes[dist_spec.dims[0]] *= dist_spec.num_partitions[0]
    return torch.Size(sizes)


def _dtensor(group: ProcessGroup, tensor: torch.Tensor) -> DTensor:
    """Return the whole of a part; a plain tensor is one on every rank."""
    placement: Placement = Replicate()
    if isinstance(tensor, ColoTensor):
        placement = placement_of(tensor.dist_spec, tensor.size_global())
        tensor = _plain(tensor)
    return DTensor.from_local(tensor, group.mesh["tp"], [placement], run_check=False)


def _part(group: ProcessGroup, value: torch.Tensor, to_whole: bool = True) -> torch.Tensor:
    """Return this rank's part of a result; sums that ranks have terms of are added up."""
    if not isinstance(value, DTensor):
        return ColoTensor._made(value, ColoTensorSpec(group))
    (placement,) = value.placements
    if to_whole or type(placement) is not Shard:
        return ColoTensor._made(value.redistribute(placements=[Replicate()]).to_local(), ColoTensorSpec(group))
    return ColoTensor._made(value.to_local(), ColoTensorSpec(group, _dist_spec(placement, group)))


def _dist_spec(placement: Placement, group: ProcessGroup) -> ShardSpec | ReplicaSpec:
    if isinstance(placement, Shard):
        return ShardSpec([placement.dim], [group.tp_world_size()])
    return ReplicaSpec()


def _same_division(shape: torch.Size, dist_spec: ShardSpec | ReplicaSpec, grad: torch.Tensor) -> None:
    # autograd would add up parts of different divisions, by broadcasting; their shapes differ
    if grad.shape != shape:
        raise NotSupportedError(
            f"a gradient of a leaf as it was divided before set_dist_spec({dist_spec}); call set_dist_spec before the "
            "forward, or after the backward"
        )


def _refuse(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    in_place = name in SERVED_IN_PLACE
    if name not in SERVED and not in_place:
        raise NotSupportedError(
            f"{name} is not served on a divided ColoTensor; call t.to_replicate() first (t.data is this rank's part)"
        )
    if kwargs.get("out") is not None or kwargs.get("inplace"):
        raise NotSupportedError(f"{name} of a divided ColoTensor into another tensor is not served; take the result")
    if in_place and torch.is_grad_enabled() and any(t.requires_grad for t in args if isinstance(t, torch.Tensor)):
        raise NotSupportedError(
            f"{name} in place on a divided ColoTensor, which autograd would not record; write t = t + x"
        )
