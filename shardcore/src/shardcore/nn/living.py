"""The sharded models that live, and which tensors are theirs.

What shardcore changes in torch for the whole process acts on these tensors alone, and ends with the last of the models
(`shardcore.nn.process`). A tensor belongs to a model by its memory: views, ``.data`` and entries of a state dict do as
well, which no mark on a parameter would reach.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardcore._torch import FakeTensor
from shardcore.comm.dtensor_params import in_memory, spec_of

#: By id: a module may be equal to others, and lack a hash.
_MODELS: weakref.WeakValueDictionary[int, nn.Module] = weakref.WeakValueDictionary()


def add(module: nn.Module, at_end: Callable[[], None]) -> None:
    """Count a sharded model among the living; ``at_end`` is called after the last of them."""
    if not is_living(module):
        _MODELS[id(module)] = module
        # Runs where the model is freed, in any thread.
        weakref.finalize(module, lambda: None if any(True for _ in _MODELS.values()) else at_end()).atexit = False


def is_living(module: nn.Module) -> bool:
    """Tell whether ``module`` is a sharded model, or a parallel module that stands alone."""
    return _MODELS.get(id(module)) is module


def owns(*tensors: Any) -> bool:
    """Tell whether any of these is a parameter of a living model, its gradient, or looks at the memory of one."""
    wanted = {_memory(tensor) for tensor in tensors if isinstance(tensor, DTensor)}
    return bool(wanted) and any(_memory(tensor) in wanted for tensor in _tensors())


def lies_on_a_mesh(tensor: DTensor) -> bool:
    """Tell whether the parameters of a living model lie on the mesh of ``tensor``, as what is computed from them."""
    mesh = spec_of(tensor).mesh
    return any(spec_of(each).mesh == mesh for each in _tensors())


def _tensors() -> Iterator[DTensor]:
    for module in list(_MODELS.values()):
        for parameter in module.parameters():
            for tensor in (parameter, parameter.grad):
                if isinstance(tensor, DTensor):
                    yield tensor


def _memory(tensor: DTensor) -> object:
    """Return what tells the memory of this rank's part from others; without memory, the tensor from others."""
    local = in_memory(tensor)
    if isinstance(local, FakeTensor):  # of a plan, beside which models may live
        return id(tensor)
    if address := local.untyped_storage().data_ptr():
        return local.device, address
    # The part is empty: this rank has to decide as the others do.
    return spec_of(tensor) if local.numel() == 0 and not local.is_meta else id(tensor)
