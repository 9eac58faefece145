"""Where a thread of this process is: in whose code, and whether it waits for other ranks there."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

__all__ = ["A_MODEL", "Whereabouts"]

#: Packages whose lines tell a user little.
_LIBRARIES = ("torch", "threading", "queue")
#: Those of shardcore are told by their files: what stands beside the package may bear its name.
_OWN = f"{Path(__file__).parents[1]}{os.sep}"
#: What was installed: a line of the user's is told rather than one of these.
_INSTALLED = tuple({f"{sysconfig.get_path(kind)}{os.sep}" for kind in ("stdlib", "purelib", "platlib")})

#: What a rank waits in that is in a call.
A_MODEL = "a sharded model"

#: Functions of torch in which a rank waits for the one that sends.
_OF_ONE = ("broadcast", "scatter", "recv")

#: Collectives of torch that end when every rank of the group has come.
_OF_ALL = ("all_", "barrier", "monitored_barrier", "reduce_scatter", "_all_gather_base", "_reduce_scatter_base")


@dataclass(frozen=True)
class Whereabouts:
    """Where a thread is.

    Attributes:
        place: the innermost line of the user's own, not a library's, for people; "" if there is none.
        waits_in: what it waits in together with other ranks, for people; "" if in nothing that is known here.
        waits_for: the global ranks that have to come there.
        meeting: the name of the meeting that it waits in; "" if in none.
        ended: the script has come to its end, and does nothing more.
    """

    place: str
    waits_in: str = ""
    waits_for: tuple[int, ...] = ()
    meeting: str = ""
    ended: bool = False

    @classmethod
    def of(cls, thread: int) -> Whereabouts:
        """Return those of a ``thread``; of the main one, if that is not there any more."""
        # Not kept: it has the frame that this is, and with that would live on as a cycle, with all that they hold.
        frame = sys._current_frames().get(thread) or sys._current_frames().get(threading.main_thread().ident or 0)
        place, library, waits_in, meeting = "", "", "", ""
        waits_for: tuple[int, ...] = ()
        ended = frame is None
        while frame is not None:
            module, name = str(frame.f_globals.get("__name__")), frame.f_code.co_name
            if not waits_in:
                waits_in, waits_for, meeting = _waits(frame, module, name)
            ended = ended or ((module, name) == ("threading", "_shutdown") and not _others_work())
            file = frame.f_code.co_filename
            if module.partition(".")[0] not in _LIBRARIES and not file.startswith(_OWN):
                if file.startswith(_INSTALLED):
                    library = library or f"{file}:{frame.f_lineno}"
                else:
                    place = place or f"{file}:{frame.f_lineno}"
            frame = frame.f_back
        return cls(place or library, waits_in, waits_for, meeting, ended)


def _others_work() -> bool:
    """Tell whether the main thread waits, at the end of the script, for others of the user."""
    return any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())


def _waits(frame: FrameType, module: str, name: str) -> tuple[str, tuple[int, ...], str]:
    # Only of these: the values of a frame that were read stay with it, though its variables have others by then.
    if module == "torch.distributed.distributed_c10d" and name.startswith(_OF_ALL):
        group = frame.f_locals.get("group")
        return f"torch.distributed.{name}", tuple(dist.get_process_group_ranks(group)), ""
    if module == "torch.distributed.distributed_c10d" and name in _OF_ONE:
        return f"torch.distributed.{name}", _source(frame.f_locals), ""
    if module == "shardcore.agree.meeting" and name == "hold":
        inside = frame.f_locals
        call = str(inside.get("call"))
        what = A_MODEL if call in ("call", "forward") else call
        return what, tuple(inside.get("ranks", ())), str(inside.get("base"))
    if module == "shardcore.comm.channel" and name == "wait_watched":
        channel = frame.f_locals.get("channel")
        if channel is not None:
            return A_MODEL, tuple(dist.get_process_group_ranks(channel.group)), ""
    return "", (), ""


def _source(inside: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the global rank that sends in a collective with these local variables, if it says which."""
    source, place = inside.get("src"), inside.get("group_src")
    if isinstance(source, int):
        return (source,)
    group: Any = inside.get("group") or dist.group.WORLD
    return (dist.get_global_rank(group, place),) if isinstance(place, int) else ()
