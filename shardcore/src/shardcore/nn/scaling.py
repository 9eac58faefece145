"""Infinite gradients that one rank alone has: all ranks have to leave out the step.

`torch.amp.GradScaler` unscales all gradients of an optimizer in one call. For DTensors torch (2.11 to 2.14) brings
what a rank found to the others along the axes that split the *first* gradient. If that one is replicated (a norm, a
class token) they are not told of an inf in another one's part: one rank leaves out the step, the others make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardcore._private import SCALING, missing
from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.nn.handlers import Undo
from shardcore.nn.living import owns

__all__ = ["find_inf_on_all_ranks"]


def find_inf_on_all_ranks() -> Undo:
    """Let gradient scalers of sharded models bring what they found along every axis that splits any gradient."""
    if missing(SCALING):
        return lambda: None
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    operation = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    native = handlers[operation]

    def unscale(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _unscale(operation, *args) if owns(*args[0]) else native(operation, args, kwargs)

    handlers[operation] = unscale

    def undo() -> None:
        if handlers.get(operation) is unscale:
            handlers[operation] = native

    return undo


def _unscale(operation: Any, grads: Sequence[Any], found: Tensor, factor: Tensor) -> None:
    operation([local_tensor(grad) for grad in grads], found, factor)
    told = set()
    for grad in grads:
        spec = spec_of(grad)
        for axis, placement in enumerate(() if spec is None else spec.placements):
            group = spec.mesh.get_group(axis)
            if not placement.is_replicate() and group.group_name not in told:
                told.add(group.group_name)
                dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
