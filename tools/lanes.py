"""Sessions of nox side by side: those that share an environment follow each other, the others run in lanes.

A session of one pack installs it into its environment and removes the others, so no two of those may use one
environment at a time; what tests all packs together shares theirs (`suites.everything`), and needs no turns.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

__all__ = ["group", "run"]


def group(sessions: Iterable[str], environments: Mapping[str, str]) -> list[list[str]]:
    """Return the sessions by environment, in the order in which the first of each comes.

    Args:
        sessions: their names.
        environments: name -> the environment that the session uses; one that is not there has its own.
    """
    groups: dict[tuple[bool, str], list[str]] = {}
    for session in sessions:
        known = session in environments
        groups.setdefault((known, environments[session] if known else session), []).append(session)
    return list(groups.values())


def run(
    groups: Sequence[Sequence[str]],
    command: Sequence[str],
    *,
    lanes: int,
    write: Callable[[str], object] = sys.stdout.write,
) -> list[str]:
    """Call ``command`` with the names of each group, as many at a time as there are lanes.

    Args:
        groups: names, which one call gets; the first ones start first.
        command: what is called.
        lanes: the number of calls at a time.
        write: is given each line that the calls print, as soon as it is whole, with the number of its group before it.

    Returns:
        The first name of each group whose call failed.
    """
    running: set[subprocess.Popen[str]] = set()
    lock = threading.Lock()
    stopped = threading.Event()

    def call(number: int, names: Sequence[str]) -> bool:
        with lock:  # what starts is either not begun or seen by the one who stops all
            if stopped.is_set():
                return False
            process = subprocess.Popen(
                [*command, *names],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
            running.add(process)
        with process:
            for line in process.stdout or ():
                with lock:
                    write(f"{number}| {line.rstrip()}\n")
            status = process.wait()
        with lock:
            running.discard(process)
        return status == 0

    with ThreadPoolExecutor(max_workers=lanes) as pool:
        calls = [pool.submit(call, number, names) for number, names in enumerate(groups, start=1)]
        try:
            return [names[0] for names, done in zip(groups, calls, strict=True) if not done.result()]
        except BaseException:
            with lock:
                stopped.set()
                for process in running:
                    process.send_signal(signal.SIGINT)  # nox passes it on to what it runs
            raise
