"""Errors of what every rank does: one on all of them, which breaks a model that was being changed.

What nobody catches is printed once for all ranks, without frames of shardcore's own. Exceptions themselves are left
alone: who catches one, or looks at it in a debugger, has the whole traceback.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from shardcore import _env
from shardcore.agree.agreement import agreement
from shardcore.errors import PartlyShardedError, ShardcoreError
from shardcore.nn import ParallelMixin
from shardcore.nn.mixin import add_mixin

_FAILURE = "_shardcore_failure"  # on a model that is broken: why


@contextlib.contextmanager
def together(
    model: nn.Module, *, group: ProcessGroup | None, doing: str = "sharding", changing: bool = False
) -> Iterator[None]:
    """Let every rank of ``group`` do something on ``model``; if it fails on one rank, all of them raise at its end.

    If it is ``changing`` the model, that is broken on all ranks then.

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
        if isinstance(error, PartlyShardedError):
            broken = error
        else:
            broken = PartlyShardedError(
                f"{doing} this {type(model).__name__} failed half-way: {type(error).__name__}: {error}. "
                "The model is unusable; build it anew."
            )
            broken.told_by = getattr(error, "told_by", None)
        model.__dict__[_FAILURE] = str(broken)
        add_mixin(model, _Broken)
        if broken is error or not isinstance(error, Exception):
            raise
        raise broken from error


def out_of_inference_mode() -> AbstractContextManager[object]:
    """Leave inference mode, whose tensors can never be trained."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def refuse_broken(model: nn.Module) -> None:
    """Raise if work on ``model`` has failed half-way."""
    if _FAILURE in model.__dict__:
        raise PartlyShardedError(model.__dict__[_FAILURE])


class _Broken(ParallelMixin):
    """A model that was left half-way: it says so whenever it is called."""

    keeps_name = True

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:  # before any hook of a wrapper that failed as well
        raise PartlyShardedError(self.__dict__[_FAILURE])

    forward = __call__


_OURS = "_shardcore_tells_once"
_SHOWN = 120  # signs of a message that another rank has in full
#: Between the call in the user's script and what raises there are frames of these alone.
_INSIDE = ("shardcore", "torch", "contextlib")


def tell_once() -> None:
    """Print errors of shardcore that end this process on one of the ranks that have the same to say; others: one line.

    All ranks leave them to torchrun too, whose summary is the last thing on the screen. The first call acts.
    """
    before = sys.excepthook
    if hasattr(before, _OURS):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, ShardcoreError):
            before(kind, error, trace)
            return
        rank = dist.get_rank() if dist.is_initialized() else None
        now = time.time()
        if rank is None or error.told_by in (None, rank):
            _leave_to_torchrun(f"{kind.__name__}: {error}", math.floor(now))
            error.__traceback__ = _outside(trace)
            try:
                before(kind, error, error.__traceback__)
            finally:
                error.__traceback__ = trace
        else:
            first = textwrap.shorten(str(error).partition("\n")[0], _SHOWN, placeholder=" ...")
            line = f"{kind.__name__}, in full on rank {error.told_by}: {first}"
            _leave_to_torchrun(line, math.ceil(now))  # later than the one in full, which is shown as the cause
            print(f"[rank{rank}]: {line}", file=sys.stderr)

    setattr(hook, _OURS, True)
    sys.excepthook = hook


def _outside(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without what shardcore, and torch for it, have called last."""
    frames = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    while frames and str(frames[-1].tb_frame.f_globals.get("__name__")).partition(".")[0] in _INSIDE:
        frames.pop()
    found: TracebackType | None = None
    for frame in reversed(frames):
        found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found


def _leave_to_torchrun(text: str, second: int) -> None:
    """Write what went wrong where torchrun looks for it, unless somebody has."""
    place = _env.error_file()
    if place is None or Path(place).exists():
        return
    about = {"message": text, "extraInfo": {"py_callstack": text, "timestamp": str(second)}}
    with contextlib.suppress(OSError):  # the error itself is printed all the same
        Path(place).write_text(json.dumps({"message": about}), encoding="utf-8")
