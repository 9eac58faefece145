"""One line on a terminal that says how many bytes of how many have been moved, how fast, and what remains."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

__all__ = ["Progress", "in_bytes"]

_PAUSE = 0.2  # seconds between two changes of the line, at least
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def in_bytes(count: float) -> str:
    """Return a number of bytes in words, with three digits and a decimal unit: ``1.53 GB``."""
    unit = 0
    while count >= 999.5 and unit < len(_UNITS) - 1:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {_UNITS[unit]}"


class Progress:
    """A line that is overwritten as bytes are moved, and ended when all are; nothing where there is no terminal.

    A context manager: whatever ends the block ends the line. Any thread may call `advance`.

    Args:
        total_bytes: what will be moved.
        what: what is being done, for the start of the line: ``"saving step-10"``.
        shown: False for ranks that say nothing.
        stream: where to write; standard error if not given. Nothing is written unless it is a terminal.
        clock: tells the time, in seconds.
    """

    def __init__(
        self,
        total_bytes: int,
        what: str,
        *,
        shown: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.total, self.done = total_bytes, 0
        self._what, self._clock = what, clock
        self._stream = sys.stderr if stream is None else stream
        # Standard error is None under some launchers.
        self._shown = shown and self._stream is not None and self._stream.isatty()
        self._begin = self._last = clock()
        self._width = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def advance(self, count: int) -> None:
        """Say that ``count`` more bytes were moved."""
        with self._lock:
            self.done += count
            now = self._clock()
            if self._shown and now - self._last >= _PAUSE:
                self._last = now
                self._write(now)

    def close(self) -> None:
        """Write the line for the last time and end it; does nothing the second time."""
        with self._lock:
            if self._shown:
                self._write(self._clock())
                self._stream.write("\n")
                self._stream.flush()
            self._shown = False

    def _write(self, now: float) -> None:
        line = self._line(now - self._begin)
        self._stream.write("\r" + line.ljust(self._width))  # over all of the line before
        self._stream.flush()
        self._width = len(line)

    def _line(self, seconds: float) -> str:
        line = f"{self._what}: {in_bytes(self.done)} of {in_bytes(self.total)}"
        if seconds <= 0 or not self.done:
            return line
        speed = self.done / seconds
        line += f", {in_bytes(speed)}/s"
        if self.done < self.total:
            line += f", {(self.total - self.done) / speed:.0f} s left"
        return line
