"""Numbers that are taken out of a DTensor of which every rank has only a summand, a maximum, or a part of a norm.

``p.grad.norm().item()`` of a split parameter is the norm of this rank's part, and torch says nothing. No collective can
make it right: such a line stands in a logger of rank 0 as often as not, and the others would never come. So torch warns
where that happens.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from shardcore._private import NUMBERS
from shardcore.comm.dtensor_params import local_tensor, spec_of
from shardcore.errors import ShardcoreWarning
from shardcore.nn.handlers import Undo, handle
from shardcore.nn.living import lies_on_a_mesh

__all__ = ["warn_of_partial_numbers"]

_WORDS = (
    "this is the number of one rank's part: .item(), float(), int() and bool() of a DTensor that is partial do not add "
    "up the ranks'. tensor.full_tensor().item() is the number of the whole tensor, shardcore.grad_norm(model).item() "
    "the norm of all gradients; every rank has to make these calls."
)


def warn_of_partial_numbers() -> Undo:
    """Warn of every line of a program that takes a number out of a partial DTensor on the mesh of a sharded model.

    Without torch's table of handlers nothing is said.
    """
    return handle([torch.ops.aten._local_scalar_dense.default], _number, NUMBERS)


def _number(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the number of this rank's part, as torch does."""
    tensor = args[0]
    spec = spec_of(tensor)
    partial = any(p.is_partial() and spec.mesh.size(axis) > 1 for axis, p in enumerate(spec.placements))
    if partial and lies_on_a_mesh(tensor):
        # The caller of this function, which torch calls from C++, is the line that asks for the number. Constant words:
        # Python shows them once for each such line.
        warnings.warn(_WORDS, ShardcoreWarning, stacklevel=2)
    return operation(local_tensor(tensor))
