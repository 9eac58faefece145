"""What sharding a model changes in torch for the whole process, as long as a sharded model lives.

All of it acts on the tensors of these models alone, and docs/process.md lists it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from shardcore.nn import living
from shardcore.nn.assigned_data import refuse_dropped_data
from shardcore.nn.draws import refuse_draws_on_cpu
from shardcore.nn.handlers import Undo
from shardcore.nn.numbers import warn_of_partial_numbers
from shardcore.nn.optimizers import prepare_steps
from shardcore.nn.scaling import find_inf_on_all_ranks
from shardcore.nn.slices import refuse_lost_writes

__all__ = ["Change", "watch_torch"]

#: Makes a change, and returns how it is taken back; None if there is nothing to change yet.
Change: TypeAlias = Callable[[], Undo | None]

_CHANGES: tuple[Change, ...] = (
    warn_of_partial_numbers,
    refuse_lost_writes,
    refuse_dropped_data,
    refuse_draws_on_cpu,
    find_inf_on_all_ranks,
    prepare_steps,
)

#: What is changed now, and how it is taken back.
_UNDO: dict[Change, Undo] = {}


def watch_torch(module: nn.Module, *further: Change) -> None:
    """Let torch say or do what the DTensors of ``module`` and their optimizers lack, until no such module lives.

    Args:
        module: a sharded model, or a parallel module that stands alone.
        further: changes of other libraries, with the same end.
    """
    living.add(module, _forget)
    for change in (*_CHANGES, *further):
        if change not in _UNDO and (undo := change()) is not None:
            _UNDO[change] = undo


def _forget() -> None:
    while _UNDO:
        _, undo = _UNDO.popitem()
        undo()
