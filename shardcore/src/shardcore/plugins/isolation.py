"""Running the code of packs: what it raises, or does to warnings, is theirs alone. Imports no torch."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from shardcore.errors import PackError

__all__ = ["attempt", "in_full", "in_one_line"]

Result = TypeVar("Result")


def attempt(call: Callable[[], Result], what: str) -> Result:
    """Return what code of a pack returns; whatever it raises is an `Exception` afterwards.

    Not only exceptions are contained: ``sys.exit`` in a plugin, a test framework's "skip this" or a ``raise
    KeyboardInterrupt`` must not end the program of somebody who merely has the pack installed. An interrupt by the
    user's own Ctrl-C is no doing of the pack and goes through; where the two cannot be told apart (another thread than
    the main one, a handler of the program's own) it counts as the user's.

    Args:
        call: runs the code.
        what: names it, for the error.

    Raises:
        PackError: the code raised something that is no `Exception`; that is chained.
        Exception: the code raised it.
    """
    with _interrupts() as by_user:
        try:
            return call()
        except Exception:
            raise
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and by_user():
                raise
            raise PackError(f"{what} {_ending(error)}") from error


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """Yield a function that tells whether a KeyboardInterrupt came from a signal."""
    ours, handler = threading.current_thread() is threading.main_thread(), signal.getsignal(signal.SIGINT)
    if handler is signal.SIG_IGN:  # a process in the background: no signal comes through
        yield lambda: False
        return
    if not ours or handler is not signal.default_int_handler:
        yield lambda: True
        return
    seen: list[int] = []

    def note(number: int, frame: object) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(seen)
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _ending(error: BaseException) -> str:
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int | str | None) else type(error.code).__name__
        return f"tried to end the process, with exit code {code!r}"
    return f"raised {in_one_line(error)}"


def in_full(error: BaseException) -> str:
    """Return the type and the text of an error, whose ``__str__`` may be anything."""
    name = type(error).__name__
    with _interrupts() as by_user:
        try:
            text = str(error).strip()
        except BaseException as odd:
            if isinstance(odd, KeyboardInterrupt) and by_user():
                raise
            text = f"(it has no text: its __str__ raised {type(odd).__name__})"
    return f"{name}: {text}" if text else name


def in_one_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    return in_full(error).partition("\n")[0]
