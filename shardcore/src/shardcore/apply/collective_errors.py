"""Work that every rank does on its model: one error on all of them, which breaks a model that was being changed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup

from shardcore.agree.agreement import agreement
from shardcore.errors import PartlyShardedError
from shardcore.nn import ParallelMixin
from shardcore.nn.mixin import add_mixin

__all__ = ["out_of_inference_mode", "refuse_broken", "together"]

_FAILURE = "_shardcore_failure"  # on a model that is broken: why


@contextlib.contextmanager
def together(
    model: nn.Module, *, group: ProcessGroup | None, doing: str = "sharding", changing: bool = False
) -> Iterator[None]:
    """Let every rank of ``group`` do something on ``model``; if it fails on one rank, all of them raise at its end.

    Args:
        model: what is worked on.
        group: the ranks; None for those of the default process group.
        doing: what is done, for the error.
        changing: it changes ``model``, which is broken on all ranks if it fails on one.

    Raises:
        PartlyShardedError: it failed, and models are being changed.
        AgreementError: it failed on another rank, and nothing was changed.
    """
    try:
        with agreement(changing=changing, group=group):
            yield
    except BaseException as error:
        if not changing:
            raise
        broken = error if isinstance(error, PartlyShardedError) else _half_way(model, doing, error)
        model.__dict__[_FAILURE] = str(broken)
        add_mixin(model, _Broken)
        if broken is error or not isinstance(error, Exception):
            raise
        raise broken from error


def _half_way(model: nn.Module, doing: str, error: BaseException) -> PartlyShardedError:
    broken = PartlyShardedError(
        f"{doing} this {type(model).__name__} failed half-way: {type(error).__name__}: {error}. "
        "The model is unusable; build it anew."
    )
    broken.told_by = getattr(error, "told_by", None)
    return broken


def out_of_inference_mode() -> AbstractContextManager[object]:
    """Leave inference mode, whose tensors can never be trained."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def refuse_broken(model: nn.Module) -> None:
    """Raise if work on ``model`` has failed half-way.

    Raises:
        PartlyShardedError: it has.
    """
    if _FAILURE in model.__dict__:
        raise PartlyShardedError(model.__dict__[_FAILURE])


class _Broken(ParallelMixin):
    """A model that was left half-way: it says so whenever it is called."""

    keeps_name = True

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:  # before any hook of a wrapper that failed as well
        raise PartlyShardedError(self.__dict__[_FAILURE])

    forward = __call__
