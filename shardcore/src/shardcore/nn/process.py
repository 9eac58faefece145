"""What sharding a model changes in torch for the whole process, as long as a sharded model lives.

All of it acts on the tensors of these models alone, and docs/process.md lists it. Slices, optimizers and scalers of
gradients have files of their own; here is what is small:

- Numbers that are taken out of a DTensor of which every rank has only a summand, a maximum, or a part of a norm.
  ``p.grad.norm().item()`` of a split parameter is the norm of this rank's part. No collective can make it right: such a
  line stands in a logger of rank 0 as often as not, and the others would never come. So torch warns there.
- ``parameter.data = tensor``, which torch drops: the wrapper gets new memory, and the part stays. The line is refused,
  unless the tensor is the same memory, as after ``parameter.data += update``.
- Random numbers that are drawn into a DTensor on CPUs, where torch has no generator for its parts: these repeat each
  other where the ranks' seeds are alike, and what all ranks hold alike differs between them where they are not.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore._private import DRAWS, NUMBERS
from shardcore._torch import FakeTensor
from shardcore.comm.dtensor_params import in_memory, local_tensor, spec_of
from shardcore.errors import NotSupportedError, ShardcoreWarning
from shardcore.nn import living
from shardcore.nn.handlers import Undo, handle, natively, overloads
from shardcore.nn.living import lies_on_a_mesh, owns
from shardcore.nn.optimizers import find_inf_on_all_ranks, prepare_steps, step_parts
from shardcore.nn.slices import refuse_lost_writes

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


#: Everything random in place; no step of a training draws into a DTensor.
_DRAWS = overloads(
    "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_", "random_", "uniform_"
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


#: Makes a change, and returns how it is taken back; None if there is nothing to change yet.
Change: TypeAlias = Callable[[], Undo | None]

_CHANGES: tuple[Change, ...] = (
    warn_of_partial_numbers,
    refuse_lost_writes,
    refuse_dropped_data,
    refuse_draws_on_cpu,
    find_inf_on_all_ranks,
    prepare_steps,
    step_parts,
)

#: What is changed now, and how it is taken back.
_UNDO: dict[Change, Undo] = {}


def watch_torch(module: nn.Module, *further: Change) -> None:
    """Let torch say or do what the DTensors of ``module`` and their optimizers lack, until no such module lives.

    It is a sharded model, or a parallel module that stands alone; ``further`` changes are those of other libraries.
    """
    living.add(module, _forget)
    for change in (*_CHANGES, *further):
        if change not in _UNDO and (undo := change()) is not None:
            _UNDO[change] = undo


def _forget() -> None:
    while _UNDO:
        _, undo = _UNDO.popitem()
        undo()
