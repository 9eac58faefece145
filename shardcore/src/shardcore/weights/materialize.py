"""Models without values and back: `to_meta` takes their recipes, `materialize` makes this rank's parts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from shardcore._progress import Progress
from shardcore.comm.dtensor_params import is_packed, local_tensor, spec_of, with_spec
from shardcore.comm.parts import blocks_of
from shardcore.comm.raw import as_bytes
from shardcore.mesh.axes import device_type_here
from shardcore.mesh.context import ShardContext
from shardcore.weights.boxes import Reader
from shardcore.weights.lazy import LazyTensor
from shardcore.weights.recipes import Box, Recipe, constant, whole_box

#: What a tensor without values may be found in, and such a tensor itself.
_HOLDERS = frozenset({LazyTensor, dict, list, tuple})


def to_meta(model: nn.Module) -> dict[str, Recipe]:
    """Leave the parameters of ``model`` on the meta device, everything else real, and return the parameters' recipes.

    Buffers and other tensors that modules keep are small, and code may look at them at any time: they are made now. A
    parameter that has values already becomes a recipe too.

    Returns:
        The recipes by every name of the parameters.
    """
    recipes: dict[str, Recipe] = {}
    made = _Made()
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module._parameters.items():
            if parameter is not None:
                meta, recipe = made.parameter(parameter)
                if recipe is not None:
                    recipes[f"{path}.{name}" if path else name] = recipe
                module._parameters[name] = meta
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = made.real(buffer)
        for name, value in vars(module).items():
            if type(value) in _HOLDERS and name not in ("_parameters", "_buffers", "_modules"):
                module.__dict__[name] = made.real(value)
    return recipes


class _Made:
    """What became of each tensor, so that shared ones stay shared."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[Any, Any]] = {}  # with the old one, so that no id is used twice
        self._parameters: dict[int, tuple[nn.Parameter, nn.Parameter, Recipe | None]] = {}

    def parameter(self, old: nn.Parameter) -> tuple[nn.Parameter, Recipe | None]:
        """Return the parameter on the meta device, and its recipe; None if it is there already."""
        if id(old) not in self._parameters:
            new: nn.Parameter = old
            recipe: Recipe | None = None
            if isinstance(old, LazyTensor):
                recipe = old.recipe
            elif not old.is_meta:
                recipe = constant(old.detach())
            if recipe is not None:
                meta = torch.empty(recipe.shape, dtype=recipe.dtype, device="meta")
                new = nn.Parameter(meta, requires_grad=old.requires_grad)
                new.__dict__.update({name: value for name, value in old.__dict__.items() if name != "_is_param"})
            self._parameters[id(old)] = old, new, recipe
            self._parameters[id(new)] = new, new, recipe
        _, new, recipe = self._parameters[id(old)]
        return new, recipe

    def real(self, value: Any) -> Any:
        """Return ``value`` with every lazy tensor in it made."""
        if isinstance(value, LazyTensor):
            if id(value) in self._parameters:
                return self._parameters[id(value)][1]
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, value.evaluate()
            return self._tensors[id(value)][1]
        if type(value) in (list, tuple):
            new = [self.real(item) for item in value]
            return value if all(a is b for a, b in zip(new, value, strict=True)) else type(value)(new)
        if type(value) is dict:
            for key, item in value.items():
                value[key] = self.real(item)
        return value


def materialize(model: nn.Module, recipes: Mapping[str, Recipe], context: ShardContext | None, doing: str) -> None:
    """Give every parameter and buffer of ``model`` the values of its recipe.

    One tensor after the other: beside the parts that the model keeps there is never more than what the part of one
    tensor is made from. Parameters stay the objects that they are, for optimizers and FSDP2. What has no recipe keeps
    its values. What is on the meta device goes where the ``context`` of a sharded model says. A terminal sees a line
    about what this is ``doing``.
    """
    device = torch.device(device_type_here()) if context is None else context.device
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in recipes}
    total = sum(local_tensor(parameter).nbytes for parameter in parameters.values())
    with torch.no_grad(), Progress(total, doing, shown=speaks()) as progress:
        for name, parameter in parameters.items():
            _materialize_parameter(parameter, recipes[name], device)
            progress.advance(local_tensor(parameter).nbytes)
        _materialize_buffers(model, recipes, device)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        # FSDP2 keeps views of the parts it had; this makes it look at the parameters again.
        model._apply(lambda tensor: tensor)


def speaks() -> bool:
    """Tell whether this rank says what all of them do."""
    return not dist.is_initialized() or dist.get_rank() == 0


def _materialize_parameter(parameter: nn.Parameter, recipe: Recipe, device: torch.device) -> None:
    local = local_tensor(parameter) if isinstance(parameter, DTensor) else parameter.detach()
    if not local.is_meta:
        _write(recipe, parameter, local)
        return
    part = _part(parameter, local, recipe, device)
    new = nn.Parameter(_as(parameter, part), requires_grad=parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, new)


def _part(like: Tensor, local: Tensor, recipe: Recipe, device: torch.device) -> Tensor:
    """Return this rank's part of a tensor that lies as ``like`` does, in the form of ``local``."""
    places = list(_places(like))
    if device.type == "cpu" and len(places) == 1 and not is_packed(local):
        # What lies in the file as it is needed stays there.
        part = Reader().kept(recipe, places[0][0])
        if part is not None and part.dtype == local.dtype and part.shape == local.shape:
            return _by_itself(part)
    new = torch.empty_like(local, device=device, memory_format=torch.contiguous_format)
    _write(recipe, like, new)
    return new


def _by_itself(part: Tensor) -> Tensor:
    """Return the same memory as a tensor that begins where its storage does and ends with it.

    A DTensor takes the offset of its part for its own, and pickles write whole storages.
    """
    flat = torch.from_numpy(as_bytes(part.contiguous()).numpy())  # numpy keeps the mapping alive
    return flat.view(part.dtype).view(part.shape)


def _as(like: Tensor, local: Tensor) -> Tensor:
    """Return the part ``local`` as the tensor that ``like`` is, which may be on another device."""
    return with_spec(local, spec_of(like)) if isinstance(like, DTensor) else local


def _write(recipe: Recipe, like: Tensor, local: Tensor) -> None:
    """Write this rank's part of the tensor of ``recipe``, which lies as ``like`` does, to ``local``."""
    reader = Reader()
    for box, place in _places(like):
        local[place].copy_(reader.read(recipe, box))


def _places(like: Tensor) -> Iterator[tuple[Box, Any]]:
    """Yield the boxes of a tensor that this rank holds, none of them empty, with their places in the local tensor."""
    if not isinstance(like, DTensor):
        if like.numel():
            yield whole_box(like.shape), (...,)
        return
    spec = spec_of(like)
    for block in blocks_of(spec, spec.mesh.get_coordinate() or ()):
        box = tuple((at, at + size) for at, size in zip(block.offsets, block.sizes, strict=True))
        yield box, block.in_local


def _materialize_buffers(model: nn.Module, recipes: Mapping[str, Recipe], device: torch.device) -> None:
    new: dict[int, tuple[Tensor, Tensor]] = {}  # with the old one, so that no id is used twice
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            recipe = recipes.get(f"{path}.{name}" if path else name)
            if buffer is None or recipe is None:
                continue
            if id(buffer) not in new:
                new[id(buffer)] = buffer, _real_buffer(buffer, recipe, device)
            module._buffers[name] = new[id(buffer)][1]
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and id(value) in new:
                module.__dict__[name] = new[id(value)][1]  # a second reference to a buffer, kept as an attribute


def _real_buffer(buffer: Tensor, recipe: Recipe, device: torch.device) -> Tensor:
    """Return ``buffer`` with the values of ``recipe``: itself, but for one without memory, or of less than its size."""
    local = local_tensor(buffer)
    expanded = any(stride == 0 and size > 1 for stride, size in zip(local.stride(), local.shape, strict=True))
    own = not local.is_meta and not expanded
    real = local if own else torch.empty(local.shape, dtype=local.dtype, device=device)
    _write(recipe, buffer, real)
    return buffer if own else _as(buffer, real)
