"""What is printed of an error that nobody catches: once for all ranks, and no frames of shardcore's own.

Exceptions themselves are left alone: who catches one, or looks at it in a debugger, has the whole traceback.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import textwrap
import time
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from shardcore import _env
from shardcore.errors import ShardcoreError

__all__ = ["tell_once"]

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
