"""The processes of a pool, as the parent sees them, and what is raised where one of them fails."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from shardcore_testing._protocol import Failure, Join, Ready, Reply, Task

GRACE = 3.0  # seconds that the other ranks have to finish after the first failure
_START_LIMIT = 120.0  # seconds for a process to import torch, on a machine that is busy with the others
_SLOWEST = 4.0  # a limit is at most so many times as long on a busy machine
_DUMP_LIMIT = 2.0  # seconds to wait for the stacks of a worker that hangs


class WorkerError(RuntimeError):
    """At least one rank failed.

    Attributes:
        failures: every rank that failed, the first to fail first.
        stacks: the stacks of the ranks that had to be killed, since they still waited for the others.
    """

    def __init__(self, message: str, failures: Sequence[Failure] = (), stacks: Mapping[int, str] | None = None) -> None:
        self.failures = tuple(failures)
        self.stacks = dict(stacks or {})
        super().__init__(message)


class WorkerTimeout(TimeoutError):  # noqa: N818 - named for what happened, like the TimeoutError that it is
    """No rank failed, but some did not finish in time; not a WorkerError, so that no test expects it by accident.

    Attributes:
        stacks: the stacks of the ranks that had to be killed.
    """

    def __init__(self, message: str, stacks: Mapping[int, str] | None = None) -> None:
        self.stacks = dict(stacks or {})
        super().__init__(message)


class WorkerProcess:
    """The parent's end of one worker process.

    Args:
        rank: its rank.
        folder: where it writes its stacks when it is asked for them.
        device: the type of its device.
        ranks: how many there may be, which may have to share the devices.
    """

    def __init__(self, rank: int, folder: Path, device: str = "cpu", ranks: int = 1) -> None:
        self.rank = rank
        self.ready = Ready()
        self._place = device, ranks
        self.stacks = folder / f"stacks-{rank}.txt"
        self.stacks.unlink(missing_ok=True)
        self.connection, theirs = multiprocessing.Pipe()
        self.process = self._start(theirs)
        theirs.close()  # else its death would not end our input

    def _start(self, theirs: Connection) -> BaseProcess:
        process: BaseProcess = multiprocessing.get_context("spawn").Process(
            target=_serve,
            args=(self.rank, theirs, str(self.stacks), *self._place),
            name=f"shardcore-rank-{self.rank}",
            daemon=True,
        )
        with _environment(self.rank):
            process.start()
        return process

    def wait_until_ready(self) -> None:
        """Wait until it has imported torch.

        Raises:
            WorkerTimeout: it takes too long.
            WorkerError: it died, or has no device.
        """
        limit = _START_LIMIT * slowness()
        if not self.connection.poll(limit):
            raise WorkerTimeout(f"rank {self.rank} did not start within {limit:g} s")
        try:
            self.ready = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            death = self._death()
            raise WorkerError(f"rank {self.rank} did not start: {death.details}", [death]) from None
        if self.ready.complaint:
            raise WorkerError(f"rank {self.rank} did not start: {self.ready.complaint}")

    def send(self, task: Task | Join) -> None:
        """Tell it what to do."""
        with suppress(BrokenPipeError, ConnectionResetError):  # it died; `receive` says so
            self.connection.send_bytes(pickle.dumps(task))

    def receive(self) -> Reply | Failure | None:
        """Return the worker's answer, its death, or None as long as there is neither."""
        dead = self.process.exitcode is not None  # asked first: it may answer and then die
        try:
            if self.connection.poll():
                reply: Reply = pickle.loads(self.connection.recv_bytes())
                return reply
        except (EOFError, OSError):
            dead = True
        return self._death() if dead else None

    def dump_stacks(self) -> str:
        """Return the Python stacks of all threads of the worker."""
        pid = self.process.pid
        if pid is not None and self.process.exitcode is None:
            os.kill(pid, signal.SIGUSR1)
        text, end = "", time.monotonic() + _DUMP_LIMIT
        while time.monotonic() < end:
            time.sleep(0.05)
            before, text = text, self.stacks.read_text() if self.stacks.exists() else ""
            if text and text == before:
                break
        return text.rstrip() or "(no stacks: the process does not take signals)"

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.join()
        self.connection.close()

    def _death(self) -> Failure:
        self.process.join(GRACE)
        code = self.process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        details = f"the process of rank {self.rank} ended with {how} and without an answer"
        return Failure(rank=self.rank, error=f"died, {how}", details=details, at=time.monotonic())


@contextmanager
def _environment(rank: int) -> Iterator[None]:
    """Give each rank another order of sets, the same in every run, and no progress bars; taken when it starts."""
    ours = {"PYTHONHASHSEED": str(rank + 1), "TQDM_DISABLE": "1"}
    before = {name: os.environ.pop(name, None) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def _serve(rank: int, connection: Connection, stacks: str, device: str, ranks: int) -> None:
    """Be a worker: the main function of its process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent decides
    threading.Thread(target=_die_with_parent, daemon=True).start()
    with Path(stacks).open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)
        # After the handler, so that a hang in this import has a stack too; and the parent needs no torch for it.
        from shardcore_testing._worker import Worker

        Worker(rank, connection, device, ranks).serve()
        os._exit(0)  # gloo's destructors may wait for ranks that are gone


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def slowness() -> float:
    """Return how many processes there are for each core at least, between 1 and 4: what a limit is multiplied by."""
    try:
        busy = os.getloadavg()[0] / (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores())
    except OSError:  # the system does not say
        return 1.0
    return min(max(busy, 1.0), _SLOWEST)


def _cores() -> int:
    return os.cpu_count() or 1
