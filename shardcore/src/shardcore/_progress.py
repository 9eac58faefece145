"""A bar on a terminal that says how many bytes of how many have been moved, how fast, and what remains."""

from __future__ import annotations

import sys
import threading

from tqdm import tqdm  # type: ignore[import-untyped]


class Progress(tqdm):  # type: ignore[misc]  # untyped
    """A bar of bytes with ``what`` is being done; nothing where there is no terminal. Any thread may call `advance`."""

    monitor_interval = 0  # else tqdm starts a thread that lives as long as the process

    def __init__(self, total_bytes: int, what: str, *, shown: bool = True) -> None:
        # Standard error is None under some launchers.
        shown = shown and sys.stderr is not None and sys.stderr.isatty()
        super().__init__(total=total_bytes, desc=what, unit="B", unit_scale=True, disable=not shown)

    def advance(self, count: int) -> None:
        """Say that ``count`` more bytes were moved."""
        with self.get_lock():
            self.update(count)


# One for the threads of this process; tqdm's own is one for processes too, and takes a semaphore of the system.
Progress.set_lock(threading.RLock())
