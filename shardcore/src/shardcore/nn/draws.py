"""Random numbers that are drawn into a DTensor on CPUs, where torch has no generator for its parts.

Every rank would draw by its own: the parts of a tensor repeat each other where the ranks' seeds are alike, and what all
ranks hold alike differs between them where they are not. On accelerators torch draws the parts of one tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardcore._private import DRAWS
from shardcore._torch import FakeTensor
from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.errors import NotSupportedError
from shardcore.nn.handlers import Undo, handle, natively
from shardcore.nn.living import owns

__all__ = ["refuse_draws_on_cpu"]

_aten = torch.ops.aten

#: Everything random in place; no step of a training draws into a DTensor.
_DRAWS = (
    _aten.bernoulli_.float,
    _aten.bernoulli_.Tensor,
    _aten.cauchy_.default,
    _aten.exponential_.default,
    _aten.geometric_.default,
    _aten.log_normal_.default,
    _aten.normal_.default,
    _aten.random_.default,
    getattr(_aten.random_, "from"),
    _aten.random_.to,
    _aten.uniform_.default,
)


def refuse_draws_on_cpu() -> Undo:
    """Refuse random numbers in place in the parameters of sharded models on CPUs."""
    return handle(_DRAWS, _draw, DRAWS)


def _draw(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if isinstance(tensor, DTensor) and _is_wrong(tensor) and owns(tensor):
        raise NotSupportedError(
            f"{operation.__name__.partition('.')[0]} of a sharded tensor {tuple(tensor.shape)} on CPUs: each rank "
            "would draw by its own, so that the parts repeat and what all ranks hold alike differs. Nothing was "
            "changed. Initialise before shard(), or with shardcore.initialize(model); or draw whole tensors, the same "
            "on every rank, and set them with model.load_state_dict({name: tensor}, strict=False)."
        )
    return natively(operation, args, kwargs)


def _is_wrong(tensor: DTensor) -> bool:
    mesh, local = spec_of(tensor).mesh, local_tensor(tensor)
    return mesh.device_type == "cpu" and mesh.size() > 1 and not local.is_meta and not isinstance(local, FakeTensor)
