"""A pool of ranks for tests: the processes start once, and each test sends them a function."""

from __future__ import annotations

import pickle
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shardcore_testing._protocol import Failure, FunctionRef, Join, Reply, Task
from shardcore_testing.processes import GRACE, WorkerError, WorkerProcess, WorkerTimeout, slowness

__all__ = ["Failure", "WorkerError", "WorkerPool", "WorkerTimeout", "place"]

_JOIN_LIMIT = 20.0  # seconds for the ranks to make a process group and to use it once
_JOIN_TRIES = 3  # gloo loses a connection now and then; new processes find each other


class WorkerPool:
    """Runs functions on ranks that stay alive from one call to the next; for POSIX systems.

    A worker starts with the first call that needs its rank, with one compute thread. Ranks that are not needed are
    not waited for. After a hang or a death all workers are replaced at the next call.

    Example:
        >>> with WorkerPool() as pool:  # doctest: +SKIP
        ...     pool.run(torch.distributed.get_rank, world=2)
        [0, 1]

    Args:
        size: the largest number of ranks of a call.
        device: the type of the ranks' devices: ``"cpu"``, for gloo, or ``"cuda"``, for NCCL. Ranks share the cards if
            there are fewer, each under a host name of its own, as NCCL asks for: right, and slow.
        collective_timeout: limit of one collective, in seconds; longer on a machine that is busy when the ranks meet.
        note: told what is done before a function runs: processes start, ranks meet, libraries are imported.
    """

    def __init__(
        self,
        size: int = 4,
        *,
        device: str = "cpu",
        collective_timeout: float = 30.0,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.size = size
        self.device = device
        self.collective_timeout = collective_timeout
        self._note = note
        self._workers: list[WorkerProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="shardcore-pool-")
        self._generation = 0
        self._joined: int | None = None  # the world size whose group every one of its ranks is in

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        world: int = 2,
        timeout: float = 60.0,
        process_group: bool = True,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on ranks 0 to world-1 and return the results in the order of the ranks.

        The default process group has exactly ``world`` ranks; groups that the function makes are destroyed after it.
        Each call starts from the same seed, with gradients on and the warning filters of the caller; inside of
        `no_float32_islands` if the caller is, with its default dtype.

        Args:
            function: a function at the top level of a module; it is sent by name, its arguments and result by pickle.
            *args: its positional arguments.
            world: number of ranks.
            timeout: limit of the call, in seconds, on a machine that has a core for each rank and nothing else to do;
                up to four times as long where more processes run than there are cores.
            process_group: False for a function that makes the default process group itself; it finds the variables
                that torchrun sets, and the group is destroyed after it.
            **kwargs: its keyword arguments.

        Raises:
            TypeError: the function cannot be found by its name.
            WorkerError: a rank raised, died, or returned what cannot be pickled.
            WorkerTimeout: no rank failed, but some did not finish in time; or the ranks did not find each other.
        """
        if not 1 <= world <= self.size:
            raise ValueError(f"world={world} is out of range: this pool runs 1 to {self.size} ranks")
        reference = FunctionRef.of(function)
        call = pickle.dumps((args, kwargs, list(warnings.filters), _without_islands()))
        new = self._joined is None
        self._start(world)
        if process_group:
            self._join(world)
        port = None if process_group else _free_port()
        tasks = []
        for rank in range(world):
            env = {} if port is None else _torchrun_variables(rank, world, port)
            tasks.append(Task(function=reference, call=call, grouped=process_group, env=env))
        limit = timeout * slowness()
        if new:
            self._note("importing the pack and the model's library")
        replies, failures = self._ask(tasks, limit)
        if failures or len(replies) < world:
            raise self._report(f"{reference.qualname} on {world} ranks", replies, failures, world, limit)
        if not all(reply.grouped for reply in replies.values()):
            self._joined = None
        return [replies[rank].value() for rank in range(world)]

    def kill(self) -> None:
        """End every worker at once; the next call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers.clear()
        self._joined = None

    def close(self) -> None:
        """End the workers and remove the pool's files; the pool cannot be used afterwards."""
        for worker in self._workers:
            worker.connection.close()  # a worker leaves at the end of its input
        for worker in self._workers:
            worker.process.join(GRACE)
        self.kill()
        self._folder.cleanup()

    def _start(self, world: int) -> None:
        if any(worker.process.exitcode is not None for worker in self._workers):
            self.kill()
        folder, ranks = Path(self._folder.name), range(len(self._workers), world)
        new = [WorkerProcess(rank, folder, self.device, self.size) for rank in ranks]
        self._workers += new
        try:
            for worker in new:
                self._note(f"starting ranks, which import torch: {worker.rank} of {world} are there")
                worker.wait_until_ready()
                if worker.ready.note:
                    self._note(worker.ready.note)
        except BaseException:
            self.kill()
            raise

    def _join(self, world: int) -> None:
        """Have the default process group of ``world`` ranks on each of them."""
        tries = 0
        while self._joined != world:
            self._start(world)
            self._note("ranks meet")
            tries += 1
            self._generation += 1
            port = self._workers[0].ready.port
            slow = slowness()
            join = Join(world=world, generation=self._generation, port=port, timeout=self.collective_timeout * slow)
            limit = _JOIN_LIMIT * slow
            replies, failures = self._ask([join] * world, limit)
            if not failures and len(replies) == world:
                self._joined = world
            elif tries == _JOIN_TRIES:
                raise self._report(f"making a process group of {world} ranks", replies, failures, world, limit)
            else:
                self.kill()

    def _ask(self, messages: Sequence[Task | Join], limit: float) -> tuple[dict[int, Reply], list[Failure]]:
        """Send each rank its message, and collect what comes back within ``limit`` seconds."""
        try:
            for worker, message in zip(self._workers, messages, strict=False):
                worker.send(message)
            return self._collect(len(messages), time.monotonic() + limit)
        except BaseException as error:
            # The limit of a test, or Ctrl-C: whoever looks at it wants to know where the ranks were.
            stacks = [f"--- rank {w.rank}\n{w.dump_stacks()}" for w in self._workers[: len(messages)]]
            error.add_note("\n".join(["interrupted while the ranks were at:", *stacks]))
            self.kill()  # an interrupted worker would answer this task when it is asked for the next one
            raise

    def _collect(self, world: int, deadline: float) -> tuple[dict[int, Reply], list[Failure]]:
        """Return the replies by rank and the failures; a rank that is in neither did not finish."""
        replies: dict[int, Reply] = {}
        failures: list[Failure] = []
        waiting = dict(enumerate(self._workers[:world]))
        while waiting and (left := deadline - time.monotonic()) > 0:
            wait([end for worker in waiting.values() for end in (worker.connection, worker.process.sentinel)], left)
            for rank, worker in list(waiting.items()):
                answer = worker.receive()
                if answer is None:
                    continue
                del waiting[rank]
                if isinstance(answer, Reply):
                    replies[rank] = answer
                failure = answer.failure if isinstance(answer, Reply) else answer
                if failure is not None:
                    failures.append(failure)
                    deadline = min(deadline, time.monotonic() + GRACE)
        return replies, sorted(failures, key=lambda failure: failure.at)

    def _report(
        self, what: str, replies: Mapping[int, Reply], failures: Sequence[Failure], world: int, timeout: float
    ) -> WorkerError | WorkerTimeout:
        """Return the exception for a call that went wrong, and make the pool usable again."""
        dead = {failure.rank for failure in failures} - set(replies)
        hanging = [rank for rank in range(world) if rank not in replies and rank not in dead]
        stacks = {rank: self._workers[rank].dump_stacks() for rank in hanging}
        if hanging or dead:
            self.kill()
        self._joined = None  # the ranks may have made different numbers of groups; a new group counts from zero
        sections = [f"--- rank {failure.rank}: {failure.error}\n{failure.details}" for failure in failures]
        state = f"waited more than {GRACE:g} s after the first failure" if failures else "did not finish"
        sections += [f"--- rank {rank} {state}; its stacks when it was killed:\n{stacks[rank]}" for rank in hanging]
        if failures:
            names = ", ".join(f"rank {failure.rank} ({failure.error})" for failure in failures)
            return WorkerError("\n".join([f"{what} failed on {names}", *sections]), failures, stacks)
        ranks = ", ".join(map(str, hanging))
        # Last, where it is not lost if only the end of a long output is kept.
        places = [f"rank {rank} was in {place(stacks[rank])}" for rank in hanging]
        return WorkerTimeout(
            "\n".join([f"{what} did not finish within {timeout:g} s: ranks {ranks}", *sections, *places]), stacks
        )


def place(stacks: str) -> str:
    """Return the innermost call of the main thread, and the innermost of the function that the pool has called."""
    _, _, main = stacks.rpartition("most recent call first")
    frames = [line.strip() for line in main.splitlines()[1:] if line.strip().startswith("File ")]
    called = next((at for at, frame in enumerate(frames) if "_worker.py" in frame), 0)
    return " < ".join(dict.fromkeys([*frames[:1], *frames[max(called - 1, 0) : called]])) or "no Python code"


def _without_islands() -> Any:
    """Return the default dtype inside `no_float32_islands`, else None, without importing torch to find out."""
    islands = sys.modules.get("shardcore_testing.islands")
    return islands and islands.without_islands()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _torchrun_variables(rank: int, world: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
