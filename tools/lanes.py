"""Run sessions of a noxfile, several at a time: each lane takes the next one as soon as it is free.

What a session prints is shown when it ends, so that lines of two are not mixed. Lanes know each other by
``SHARDCORE_LANE``, from which `environments` gives each an environment of its own.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["LANE", "lanes_here", "run", "sessions_of"]

LANE = "SHARDCORE_LANE"


def lanes_here() -> int:
    """Return how many sessions this machine runs at a time: one for each core, four at most, since each has ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(4, cores))


def sessions_of(folder: Path, tags: Sequence[str], nox: Sequence[str]) -> list[str]:
    """Return the names of the sessions with any of ``tags``: those tagged ``long`` first, so that none ends alone.

    Args:
        folder: where the noxfile is.
        tags: as nox takes them.
        nox: how nox is called.
    """
    listed = subprocess.run(
        [*nox, "--list", "--json", "--tags", *tags], cwd=folder, check=True, capture_output=True, text=True
    )
    found = json.loads(listed.stdout)
    return [session["session"] for session in sorted(found, key=lambda session: "long" not in session["tags"])]


def run(folder: Path, names: Sequence[str], nox: Sequence[str], *, lanes: int, say: Callable[[str], None]) -> list[str]:
    """Run sessions, and return the names of those that failed, in the order given.

    Args:
        folder: where the noxfile is.
        names: of the sessions, in the order in which they start.
        nox: how nox is called.
        lanes: how many run at a time.
        say: gets what is to be shown.
    """
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    for lane in range(lanes):
        free.put(lane)
    running: list[subprocess.Popen[str]] = []
    lock, ended = threading.Lock(), threading.Event()

    def one(name: str) -> bool:
        lane, start = free.get(), time.monotonic()
        try:
            with lock:
                if ended.is_set():
                    return False
                say(f"{name}: started")
                process = subprocess.Popen(
                    [*nox, "--session", name],
                    cwd=folder,
                    env={**os.environ, LANE: str(lane)},
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                )
                running.append(process)
            text, _ = process.communicate()
            with lock:
                running.remove(process)
                done.append(name)
                outcome = "ended" if process.returncode == 0 else "failed"
                count = f"{len(done)} of {len(names)}"
                say(f"{text.rstrip()}\n{name}: {outcome} after {time.monotonic() - start:.0f} s, {count}")
            return process.returncode == 0
        finally:
            free.put(lane)

    done: list[str] = []
    with ThreadPoolExecutor(lanes) as pool:
        try:
            passed = list(pool.map(one, names))
        except BaseException:
            # Ctrl-C reaches sessions of the same terminal by itself; others have to be told.
            with lock:
                ended.set()
                for process in running:
                    process.terminate()
            raise
    return [name for name, success in zip(names, passed, strict=True) if not success]


def print_at_once(text: str) -> None:
    """Print, also where the output is a file."""
    print(text, flush=True)


def nox_here() -> list[str]:
    """Return how the nox of this interpreter is called."""
    return [sys.executable, "-m", "nox"]
