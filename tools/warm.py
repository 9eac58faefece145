"""Processes that have imported torch already, of which others are forked.

A run of pytest on two ranks is three processes, which import torch and transformers for longer than most tests take.
`tools/mutations.py` needs such a run for each recorded mistake. It starts a *server* for what runs pytest, and one for
each rank, since it is its start that gives a process the order of its sets. None of them imports what has mistakes.

    the tool ── Forked ──> server ── fork ──> keeper ── fork ──> pytest ── Forked ──> server of rank 0 ── ...
                  <──────── number, later exit code ──────────┘
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["Forked", "run_pytest", "servers"]

_NUMBER = struct.Struct("i")
_LONG = 80
# The folder of this file, which the tools are in, is not on the path of what is forked.
_PATH = sys.path[1:]


@contextlib.contextmanager
def servers(modules: Sequence[str], *, ranks: int, env: Mapping[str, str]) -> Iterator[Path]:
    """Have servers, and return the folder that they listen in: at ``main``, and at a number for each rank.

    Args:
        modules: what they import, of what is there.
        ranks: so many ranks have one.
        env: the environment of their imports.
    """
    own: dict[str, dict[str, str]] = {"main": {}}
    seeds = own | {str(rank): {"PYTHONHASHSEED": str(rank + 1)} for rank in range(ranks)}
    command = [sys.executable, str(Path(__file__).resolve())]
    with contextlib.ExitStack() as stack:
        # The path of a socket has at most 107 bytes, wherever temporary files are.
        short = "/tmp" if len(tempfile.gettempdir()) > _LONG else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warm-", dir=short)))
        started = []
        for name, seed in seeds.items():
            pipe = subprocess.PIPE
            server = subprocess.Popen(
                [*command, str(folder / name), *modules], env={**env, **seed}, stdin=pipe, stdout=pipe
            )
            # It ends with its input.
            stack.enter_context(server)
            started.append(server)
        for server in started:
            if not server.stdout.read(1):  # type: ignore[union-attr]
                raise RuntimeError(f"a server did not start: {server.args!r}")
        yield folder


class Forked:
    """A process that a server has forked, with what the pool needs of a `multiprocessing.Process`.

    It ends when this object, or the process that holds it, does.

    Args:
        server: the socket of the server.
        function: what it calls; it is found by its name, on ``path``.
        *args: picklable arguments.
        files: descriptors that it has as well, whose numbers there follow the arguments.
        output: the descriptors that its output and its errors go to.
        path: the first entries of its ``sys.path``.
        env: its environment.
        cwd: its folder.
    """

    def __init__(
        self,
        server: Path,
        function: Callable[..., object],
        *args: object,
        files: Sequence[int] = (),
        output: tuple[int, int] = (1, 2),
        path: Sequence[str] = (),
        env: Mapping[str, str] = os.environ,
        cwd: str | Path = ".",
    ) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(server))
        request = pickle.dumps((list(path), dict(env), str(Path(cwd).resolve()), pickle.dumps((function, args))))
        socket.send_fds(self._socket, [_NUMBER.pack(len(request))], [*output, *files])
        self._socket.sendall(request)
        self._exitcode: int | None = None
        self.pid = self._number()

    @property
    def sentinel(self) -> int:
        """What is readable when it ends."""
        return self._socket.fileno()

    @property
    def exitcode(self) -> int | None:
        """Its exit status, the negative number of a signal, or None as long as it runs."""
        self.join(0)
        return self._exitcode

    def join(self, timeout: float | None = None) -> None:
        """Wait until it ends."""
        if self._exitcode is None and select.select([self._socket], [], [], timeout)[0]:
            self._exitcode = self._number()
            self._socket.close()

    def __del__(self) -> None:
        self._socket.close()

    def kill(self) -> None:
        """End it at once, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _number(self) -> int:
        said = self._socket.recv(_NUMBER.size, socket.MSG_WAITALL)
        return int(_NUMBER.unpack(said)[0]) if said else -signal.SIGKILL


def run_pytest(arguments: Sequence[str], folder: str) -> int:
    """Run pytest, whose pools fork the ranks that have a server in a folder, if one is named; return its status."""
    import pytest

    # What is imported already has no test in it.
    options = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *arguments], plugins=[_ForkedRanks(Path(folder))] if folder else []))


class _ForkedRanks:
    """A plugin of pytest.

    Args:
        folder: that of the servers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def pytest_sessionstart(self) -> None:
        """Let pools ask the servers."""
        from shardcore_testing.processes import WorkerProcess

        spawn, folder = WorkerProcess._start, self.folder

        def start(process: Any, theirs: Any) -> Any:
            server = folder / str(process.rank)
            if not server.exists():
                return spawn(process, theirs)
            file = [theirs.fileno()]
            env = {**os.environ, "PYTHONHASHSEED": str(process.rank + 1)}  # with which the server was started
            place = (process.rank, str(process.stacks), *process._place)
            return Forked(server, _rank, *place, files=file, path=sys.path, env=env)

        WorkerProcess._start = start  # type: ignore[assignment, method-assign]


def _rank(rank: int, stacks: str, device: str, ranks: int, descriptor: int) -> None:
    from multiprocessing.connection import Connection

    from shardcore_testing.processes import _serve

    _serve(rank, Connection(descriptor), stacks, device, ranks)


def _listen(address: str, modules: Sequence[str]) -> None:
    for name in modules:
        if find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(16)
        sys.stdout.write(".")
        sys.stdout.flush()
        while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
            client, _ = listener.accept()
            if not os.fork():
                listener.close()
                _keep(client)
            client.close()


def _keep(client: socket.socket) -> None:
    """Fork the process that was asked for, and tell how it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    said, files, _, _ = socket.recv_fds(client, _NUMBER.size, 8)
    request = client.recv(_NUMBER.unpack(said)[0], socket.MSG_WAITALL)
    pid = os.fork()
    if not pid:
        status = os.EX_SOFTWARE  # no status of pytest
        try:
            status = _become(client, files, *pickle.loads(request))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for file in files:
        os.close(file)
    with contextlib.suppress(OSError):  # it has ended, or has done so
        os.setpgid(pid, pid)  # before anybody can know it, and end it with what it has started
    client.sendall(_NUMBER.pack(pid))
    _, ended = os.waitpid(pid, 0)
    with contextlib.suppress(OSError):  # who asked has gone
        client.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(ended)))
    os._exit(0)


def _become(
    client: socket.socket, files: Sequence[int], path: Sequence[str], env: Mapping[str, str], cwd: str, call: bytes
) -> int:
    """Be as a process that was started anew, and call the function; return its exit status."""
    os.setpgid(0, 0)
    threading.Thread(target=_die_with, args=(client,), daemon=True).start()
    nothing = os.open(os.devnull, os.O_RDONLY)
    for place, file in enumerate((nothing, *files[:2])):
        os.dup2(file, place)
        os.close(file)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = dict.fromkeys([*path, *_PATH])
    random.seed()
    function, args = pickle.loads(call)
    return function(*args, *files[2:]) or 0


def _die_with(client: socket.socket) -> None:
    """End when nobody holds the other end of the connection."""
    client.recv(1)
    os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    # By its name, which functions are found by.
    sys.modules["warm"] = sys.modules["__main__"]
    _listen(sys.argv[1], sys.argv[2:])
