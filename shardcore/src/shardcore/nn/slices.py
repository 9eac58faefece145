"""Slices of a DTensor along a dim that ranks share, which torch gathers: they are copies, and a write is lost.

``weight[5:9].zero_()`` writes into memory of its own where the rows are split, and the parameter stays as it was,
without a word. Such slices may be read. What would write into one is refused before it does.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from shardcore._private import SLICES, missing
from shardcore._torch import FakeTensor
from shardcore.comm.dtensor_params import as_dtensor, local_tensor, spec_of
from shardcore.errors import NotSupportedError
from shardcore.nn.handlers import Undo, handle, natively
from shardcore.nn.living import owns

_aten = torch.ops.aten

#: The views for which torch gathers; no step of a training makes them of a DTensor.
_VIEWS = (
    _aten.slice.Tensor,
    _aten.select.int,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.diagonal.default,
)

#: Names with the ending of a write, of what writes nothing.
_HARMLESS = frozenset({"detach_", "rename_", "requires_grad_", "share_memory_"})


def refuse_lost_writes() -> Undo:
    """Refuse writes into slices of the parameters of sharded models, and of gradients, that are copies."""
    handled = handle(_VIEWS, _view, SLICES)
    patched: Any = DTensor
    if "__setitem__" not in vars(DTensor) and not missing(SLICES):
        patched.__setitem__ = _set

    def undo() -> None:
        handled()
        if vars(DTensor).get("__setitem__") is _set:
            del patched.__setitem__

    return undo


def _set(tensor: DTensor, index: Any, value: Any) -> None:
    """Set what the index shows, unless that is a copy; torch cuts it out by itself, where no function is asked."""
    parts = index if isinstance(index, tuple) else (index,)
    simple = all(part is None or part is ... or isinstance(part, int | slice) for part in parts)
    if simple and (isinstance(tensor, _Gathered) or owns(tensor)):
        with torch.no_grad():
            if isinstance(tensor[index], _Gathered):
                _refuse("an assignment")
    Tensor.__setitem__(tensor, index, value)


def _view(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    source = args[0]
    result = natively(operation, args, kwargs)
    # What a backward cuts out of a gradient is no sharded model's, and may be written.
    if not torch.compiler.is_compiling():
        for view in _tensors(result):
            if isinstance(source, _Gathered) or (_is_apart(view, source) and owns(source)):
                _mark(view)
    return result


class _Gathered(DTensor):
    """A DTensor that is a copy of what it was cut out of. It may be read like any other."""

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        written = [kwargs.get("out")]
        if _is_a_write(name):
            written.append(args[0] if args else next(iter(kwargs.values()), None))
        if any(isinstance(tensor, _Gathered) for tensor in _tensors(written)):
            _refuse(name)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # of torch
        if args and isinstance(args[0], _Gathered):
            _mark_views(result, args[0])
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub is that of a static method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # torch 2.11 takes it for a DTensor and never comes here; later releases do from inside of other functions too.
        kwargs = kwargs or {}
        given = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in given if argument.alias_info and argument.alias_info.is_write]
        if any(isinstance(tensor, _Gathered) for tensor in _tensors(written)):
            _refuse(func.__name__)
        result = func(*_plain(args), **_plain(kwargs))
        if args and isinstance(args[0], _Gathered):
            _mark_views(result, args[0])
        return result

    def __deepcopy__(self, memo: Any) -> DTensor:
        made: DTensor = _plain(self.detach()).clone().requires_grad_(self.requires_grad)
        return made

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self.detach()).__reduce_ex__(protocol)


def _refuse(name: str) -> NoReturn:
    raise NotSupportedError(
        f"{name} would write into a slice of a sharded tensor along the dim that is split over ranks. torch has "
        "gathered that slice into a copy, and the tensor would stay as it is; nothing was written. Multiply the whole "
        "tensor by a mask, tensor.mul_(distribute_tensor(mask, tensor.device_mesh, tensor.placements)), or give it all "
        "its values with tensor.copy_(distribute_tensor(...)), under torch.no_grad(). To change a copy, clone() it "
        "first."
    )


def _is_a_write(name: str) -> bool:
    inner = name.strip("_")
    if name.startswith("__"):
        return inner == "setitem" or (inner[:1] == "i" and hasattr(Tensor, f"__{inner[1:]}__"))
    return name.endswith("_") and name not in _HARMLESS


def _is_apart(view: DTensor, source: DTensor) -> bool:
    one, other = local_tensor(view), local_tensor(source)
    if isinstance(one, FakeTensor) or one.is_meta:
        return False
    if type(one) is type(other) is Tensor:
        return one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
    splits = [[placement.is_shard() for placement in spec_of(tensor).placements] for tensor in (view, source)]
    return splits[0] != splits[1]


def _mark_views(result: Any, source: DTensor) -> None:
    for view in _tensors(result):
        if not _is_apart(view, source):
            _mark(view)


def _mark(view: DTensor) -> None:
    view.__class__ = _Gathered  # torch goes on with this very object: it stays the view of its graph


def _tensors(value: Any) -> list[DTensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, DTensor)]


def _plain(value: Any) -> Any:
    return tree_map_only(_Gathered, as_dtensor, value)
