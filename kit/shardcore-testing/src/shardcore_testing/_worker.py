"""The side of the worker pool that runs in a worker process: one rank, one task at a time."""

from __future__ import annotations

import gc
import os
import pickle
import random
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # while there is no process group: that of its import is the default of its functions
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, not in the stubs

from shardcore.mesh.axes import accelerator, forget_shared, shared_groups
from shardcore_testing._forgetting import forget_compiled, forget_meshes
from shardcore_testing._protocol import Failure, Join, Ready, Reply, Task
from shardcore_testing.islands import no_float32_islands

# So many new modules, those of a library, are frozen at once; fewer wait until there is no process group.
_MANY_MODULES = 200
# After so many tasks, garbage is looked for in any case.
_TASKS = 20
# After so many process groups, garbage is looked for among what is frozen too.
_LEFT = 16


class Worker:
    """Runs the tasks that arrive on a connection as one rank.

    Args:
        rank: the rank.
        connection: to the parent.
        device: the type of its device.
        ranks: how many ranks there may be.
    """

    def __init__(self, rank: int, connection: Connection, device: str = "cpu", ranks: int = 1) -> None:
        self.rank = rank
        self.device, self.ranks = device, ranks
        self.connection = connection
        self.store: TCPStore | None = None
        self.joined: dist.ProcessGroup | None = None
        self.frozen = 0  # number of modules whose objects are frozen
        self.frozen_in_group = False  # objects that hold a process group may be among them
        self.tasks = 0
        self.ended = False  # groups have ended since the last collection
        self.left = 0  # number of process groups that this rank has left

    def serve(self) -> None:
        """Say that this rank is ready, and on rank 0 where the store is; answer until the parent closes the connection.

        One store serves every group: a rank that asks a store which is not there yet waits 5 seconds before it asks
        again. It is no file: waits in a FileStore were seen to outlast the time limit of the group.
        """
        torch.set_num_threads(1)
        _prefer_loopback()
        if self.rank == 0:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ready = take_device(self.device, self.rank, self.ranks, port=self.store.port if self.store else 0)
        self.connection.send_bytes(pickle.dumps(ready))
        while True:
            try:
                message = self.connection.recv_bytes()
            except EOFError:
                return
            task: Task | Join = pickle.loads(message)
            reply = self._answer(task)
            self.tasks += 1
            # A group that nobody holds ends its threads. A collection costs a tenth of what a test does.
            if self.ended or self.tasks % _TASKS == 0:
                gc.collect()
                self.ended = False
            sys.stdout.flush()
            sys.stderr.flush()
            self.connection.send_bytes(pickle.dumps(reply))

    def _answer(self, task: Task | Join) -> Reply:
        try:
            if isinstance(task, Join):
                self._join(task)
                return Reply()
            result = self._run(task)
        except BaseException as error:  # SystemExit and pytest's outcomes too: a rank always answers
            return Reply(failure=self._failure(error), grouped=False)
        try:
            return Reply(result=pickle.dumps(result), grouped=self._is_joined())
        except Exception as error:
            error.add_note(f"rank {self.rank} returned a {type(result).__qualname__} that cannot be pickled")
            return Reply(failure=self._failure(error), grouped=False)

    def _failure(self, error: BaseException) -> Failure:
        details = "".join(traceback.format_exception(error)).rstrip()
        return Failure(rank=self.rank, error=type(error).__name__, details=details, at=time.monotonic())

    def _run(self, task: Task) -> Any:
        function = task.function.load()
        args, kwargs, filters, default = pickle.loads(task.call)
        if len(sys.modules) - self.frozen >= _MANY_MODULES:
            self._freeze()
            self.frozen_in_group = dist.is_initialized()
        with _isolated(task.env):
            if not task.grouped:
                self._leave()
            try:
                torch.set_default_dtype(default or torch.get_default_dtype())
                with _warning_filters(filters), no_float32_islands() if default else nullcontext():
                    torch.manual_seed(0)
                    random.seed(0)
                    return function(*args, **kwargs)
            finally:
                forget_compiled()
                if task.grouped:
                    self.ended |= _destroy_subgroups()
                else:
                    self._leave()

    def _freeze(self) -> None:
        """Keep what modules hold out of collections and searches of the heap; a million objects of torch otherwise."""
        gc.collect()  # first, else garbage of earlier tasks would not be freed
        gc.freeze()
        self.frozen = len(sys.modules)

    def _join(self, join: Join) -> None:
        self._leave()
        limit = timedelta(seconds=join.timeout)
        if self.store is None:
            self.store = TCPStore("127.0.0.1", join.port, is_master=False, timeout=limit)
        self.store.set_timeout(limit)
        store = PrefixStore(f"group-{join.generation}", self.store)
        backend = "gloo" if self.device == "cpu" else dist.get_default_backend_for_device(self.device)
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=join.world, timeout=limit)
        dist.barrier()  # gloo was seen to make groups that one rank takes for ready and another does not
        self.joined = dist.group.WORLD

    def _leave(self) -> None:
        self.joined = None
        if not dist.is_initialized():
            return
        forget_meshes()
        forget_shared()
        dist.destroy_process_group()
        self.left += 1
        # A frozen cycle that holds a group keeps its threads, of which some wake a hundred times a second.
        if self.frozen_in_group or self.left % _LEFT == 0:
            gc.unfreeze()
            self.frozen_in_group = False
        self._freeze()

    def _is_joined(self) -> bool:
        return dist.is_initialized() and dist.group.WORLD is self.joined


def take_device(kind: str, rank: int, ranks: int, port: int = 0) -> Ready:
    """Compute on a device of this ``kind`` from now on; ranks share them where there are fewer than ``ranks``."""
    if kind == "cpu":
        return Ready(port=port)
    devices = torch.get_device_module(kind).device_count() if kind == accelerator() else 0
    if not devices:
        return Ready(complaint=f"there is no {kind} device here that this torch can use; see: shardcore doctor")
    # Ranks that compute one replicated gradient get the same bits: kernels of CUDA do not by themselves.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.backends.cudnn.deterministic = True
    torch.get_device_module(kind).set_device(rank % devices)
    if devices >= ranks:
        return Ready(port=port)
    os.environ.update(sharing(rank))
    return Ready(port=port, note=f"{ranks} ranks share {devices} {kind} device(s), and talk over sockets")


def sharing(rank: int) -> dict[str, str]:
    """Return what NCCL has to find in the environment of a rank that is not alone on its card.

    It refuses two ranks on one card of one host; with a host name for each it takes the network between them.
    """
    network = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"}
    return {"NCCL_HOSTID": f"rank-{rank}", **network}


def _destroy_subgroups() -> bool:
    """Give back the threads and sockets of the groups that a task made, but for those that all models share."""
    if not dist.is_initialized():
        return False
    kept = {dist.group.WORLD, *shared_groups()}
    # torch has no public list of the groups there are.
    made = [group for group in dist.distributed_c10d._world.pg_map if group not in kept]
    if made:
        forget_meshes()
    for group in made:
        dist.destroy_process_group(group)
    return bool(made)


def _prefer_loopback() -> None:
    """Keep gloo off the host's name, which many containers cannot resolve."""
    names = {name for _, name in socket.if_nameindex()}
    for loopback in ("lo", "lo0"):
        if loopback in names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)


@contextmanager
def _isolated(env: dict[str, str]) -> Iterator[None]:
    """Set ``env``, and afterwards put back the process-wide state that a test may have changed."""
    environ = dict(os.environ)
    dtype, device, threads = torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()
    deterministic = torch.are_deterministic_algorithms_enabled()
    generators = torch.get_rng_state(), random.getstate()
    os.environ.update(env)
    try:
        yield
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        if dict(os.environ) != environ:
            os.environ.clear()
            os.environ.update(environ)


@contextmanager
def _warning_filters(filters: list[tuple[Any, ...]]) -> Iterator[None]:
    """Treat warnings as the parent does: ``filters`` are its ``warnings.filters``, first match first."""
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for action, message, category, module, line in filters:
            warnings.filterwarnings(action, _pattern(message), category, _pattern(module), line, append=True)
        yield


def _pattern(expression: Any) -> str:
    """Return the source of a filter's pattern, which is compiled, plain text or None."""
    return str(getattr(expression, "pattern", expression or ""))
