"""``parameter.data = tensor`` of a DTensor, which torch drops: the wrapper gets new memory, and the part stays.

A DTensor is a wrapper around this rank's part, and what torch replaces is what the wrapper is itself. So the line is
refused, unless the tensor is the same memory, as after ``parameter.data += update``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardcore._torch import FakeTensor
from shardcore.comm.dtensor_params import in_memory
from shardcore.errors import NotSupportedError
from shardcore.nn.handlers import Undo
from shardcore.nn.living import owns

__all__ = ["refuse_dropped_data"]

_NATIVE: Any = Tensor.data


def refuse_dropped_data() -> Undo:
    """Refuse what torch would drop of the parameters of sharded models."""
    patched: Any = DTensor
    if "data" in vars(DTensor):
        return lambda: None
    ours = patched.data = property(_NATIVE.__get__, _set)

    def undo() -> None:
        if vars(DTensor).get("data") is ours:
            del patched.data

    return undo


def _set(tensor: DTensor, value: Tensor) -> None:
    if not torch.compiler.is_compiling() and not _is_alias(tensor, value) and owns(tensor):
        raise NotSupportedError(
            f"an assignment to .data of a sharded tensor {tuple(tensor.shape)} would be dropped: torch changes the "
            "wrapper and not this rank's part, which everything computes with. Nothing was changed. Set values with "
            "module.load_state_dict({name: tensor}, strict=False), which splits whole tensors, or under torch.no_grad()"
            " with parameter.copy_(distribute_tensor(tensor, parameter.device_mesh, parameter.placements)); another "
            "dtype or device with model.to(...), or module.to(...) of the modules that are to have it, such as adapters"
        )
    _NATIVE.__set__(tensor, value)


def _is_alias(tensor: DTensor, value: Tensor) -> bool:
    if not isinstance(value, DTensor):
        return False
    one, other = in_memory(tensor), in_memory(value)
    if one is other or any(part.is_meta or isinstance(part, FakeTensor) for part in (one, other)):
        return True
    same = one.data_ptr() == other.data_ptr() and tensor.dtype == value.dtype
    return same and one.dtype == other.dtype and one.stride() == other.stride()
