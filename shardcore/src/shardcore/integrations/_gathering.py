"""How the ranks of a model bring its tensors to one of them, the *writer*, for `_saving`.

They meet in the store of the process group, not in a collective, so that a rank which does not come is named instead of
waited for. The writer tells its progress there too, so that its failure reaches all; and while it writes, however
slowly, a thread of it counts in the store, so that one that was killed or stopped is noticed.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor

from shardcore.comm.dtensor_params import spec_of
from shardcore.comm.parts import Block, blocks_of, split_dim
from shardcore.errors import AgreementError, MissingRanksError
from shardcore.mesh import device_type_of

__all__ = ["Meeting", "Transport"]

_PATIENCE = 60.0  # seconds to wait for the ranks that have not called
_POLL = 0.05  # seconds between two looks into the store, at most
_BEAT = 1.0  # seconds between two signs of life of the writer, at most


@dataclass(slots=True)
class Meeting:
    """All ranks of a model in the same call.

    Attributes:
        store: of the default process group.
        name: of this meeting, the prefix of its keys.
        reports: what each global rank brought, in the order of the mesh.
        step: how often the writer has told the others to go on.
    """

    store: Store
    name: str
    reports: dict[int, dict[str, Any]]
    step: int = field(default=0)

    @classmethod
    def hold(cls, ranks: Sequence[int], report: Mapping[str, Any]) -> Meeting:
        """Wait until all ``ranks`` are here.

        Meetings of the same ranks are numbered in the store. A number ends when all have come or, for all at once, when
        the first rank runs out of patience; whoever comes later meets under the next number.

        Raises:
            MissingRanksError: some ranks did not come.
        """
        store = dist.distributed_c10d._get_default_store()  # the only store that every process group has
        base = f"shardcore/save/{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
        end = time.monotonic() + _PATIENCE
        while True:
            name = f"{base}/{store.add(f'{base}/number', 0)}"
            missing = _attend(store, base, name, ranks, json.dumps(report), end)
            if not missing:
                return cls(store, name, {rank: json.loads(store.get(f"{name}/{rank}")) for rank in ranks})
            if dist.get_rank() not in missing:
                raise MissingRanksError(
                    f"save_pretrained has to be called by all {len(ranks)} ranks of the model, and within "
                    f"{_PATIENCE:g} s these did not: {', '.join(map(str, missing))}. Nothing was written. Call it on "
                    "every rank (outside any `if rank == 0`); only one of them writes.",
                    missing,
                )

    def proceed(self) -> None:
        """On the writer: tell the others to go on."""
        self.store.set(f"{self.name}/step{self.step}", "")
        self.step += 1

    @contextmanager
    def telling(self) -> Iterator[None]:
        """On the writer: give signs of life, and tell the others of an error."""
        done = threading.Event()
        beat = threading.Thread(target=self._beat, args=(done,), daemon=True)
        beat.start()
        try:
            yield
        except BaseException as error:  # an interrupt too: the others wait
            self.store.set(f"{self.name}/step{self.step}", f"{type(error).__name__}: {error}")
            raise
        finally:
            done.set()
            beat.join()

    def _beat(self, done: threading.Event) -> None:
        while not done.wait(_BEAT):
            try:
                self.store.add(f"{self.name}/beat", 1)
            except (RuntimeError, OSError):  # the store is gone; the call that saves finds out by itself
                return

    def follow(self, writer: int) -> None:
        """On the other ranks: wait until the ``writer`` has taken its next step.

        Raises:
            AgreementError: it failed.
            MissingRanksError: for as long as the timeout of the process group it gave no sign of life.
        """
        key = f"{self.name}/step{self.step}"
        patience, beats = _timeout(), -1
        while True:
            end = time.monotonic() + patience
            while not _wait(self.store, key, min(end, time.monotonic() + _BEAT)):
                known, beats = beats, self.store.add(f"{self.name}/beat", 0)
                if beats != known:
                    break
                if time.monotonic() > end:
                    raise MissingRanksError(_GONE.format(writer=writer, seconds=patience), (writer,))
            else:
                break
        self.step += 1
        if error := self.store.get(key).decode():
            raise AgreementError(f"rank {writer} failed to save the model. Its error: {error}")


_GONE = (
    "rank {writer}, which writes the model for all, has given no sign of life for {seconds:g} s (the timeout of the "
    "process group): it was killed or stopped, or cannot be reached. The folder holds the earlier checkpoint, or the "
    "new one; start the job again."
)


def _timeout() -> float:
    """Return the timeout of the default process group, in seconds."""
    # The only way to a group's timeout, which may have been changed since it was made.
    backend: Any = dist.distributed_c10d._get_default_group()._get_backend(torch.device(device_type_of()))
    seconds: float = backend.options._timeout.total_seconds()
    return seconds


def _attend(store: Store, base: str, name: str, ranks: Sequence[int], report: str, end: float) -> list[int]:
    """Come to the meeting ``name`` and return who was missing when it was decided."""
    outcome = f"{name}/outcome"
    store.set(f"{name}/{dist.get_rank()}", report)
    if store.add(f"{name}/count", 1) == len(ranks):
        _decide(store, base, name, [])
    if not _wait(store, outcome, end):
        _decide(store, base, name, [rank for rank in ranks if not store.check([f"{name}/{rank}"])])
        if not _wait(store, outcome, time.monotonic() + _timeout()):
            raise MissingRanksError("save_pretrained: a rank was lost while the ranks met. Nothing was written.")
    missing: list[int] = json.loads(store.get(outcome))
    return missing


def _decide(store: Store, base: str, name: str, missing: list[int]) -> None:
    # The first rank to add decides for all. The number moves on before the outcome can be seen, so that whoever has
    # seen it does not come here again.
    if store.add(f"{name}/decided", 1) == 1:
        store.add(f"{base}/number", 1)
        store.set(f"{name}/outcome", json.dumps(missing))


def _wait(store: Store, key: str, end: float) -> bool:
    """Tell whether ``key`` is there before the time ``end``; looks again and again, since a store blocks in waits."""
    pause = _POLL / 50
    while not store.check([key]):
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _POLL)
    return True


class Transport:
    """Brings tensors to the writer, part by part.

    Args:
        tensors: this rank's part of every tensor by name; what is not a DTensor is taken from the writer.
        writer: the global rank that gathers.
        files: the names that will be gathered at a time, if what is gathered may use the same memory each time.
    """

    def __init__(self, tensors: Mapping[str, Any], writer: int, files: Sequence[Sequence[str]] = ()) -> None:
        self.tensors = tensors
        self.writer = writer
        self.files = files
        self.memory: Tensor | None = None
        self.device = torch.device(device_type_of())

    def send(self, names: Iterable[str]) -> None:
        """On the other ranks: send this rank's parts of the tensors ``names``."""
        for tensor in self._distinct(names).values():
            if isinstance(tensor, DTensor):
                for owner, block in _parts(tensor, self.writer):
                    if owner == dist.get_rank():
                        part = tensor.to_local().detach()[block.in_local]
                        dist.send(_bytes(part.to(self.device).contiguous()), self.writer)

    def gather(self, names: Iterable[str], ready: Callable[[], None]) -> dict[str, Any]:
        """On the writer: return the whole tensors ``names``, on the CPU.

        One tensor under two names arrives once. ``ready`` is called when there is room for all, before any is awaited.
        """
        names = list(names)
        sources = self._distinct(names)
        memory = self._memory()
        whole = {key: self._room(source, memory) for key, source in sources.items()}
        ready()
        for key, source in sources.items():
            if self._is_awaited(source):
                self._fill(whole[key], source)
        return {name: whole[id(self.tensors[name])] for name in names}

    def _distinct(self, names: Iterable[str]) -> dict[int, Any]:
        return {id(self.tensors[name]): self.tensors[name] for name in names}

    def _is_awaited(self, tensor: Any) -> bool:
        """Tell whether the writer lacks a part of ``tensor``."""
        return isinstance(tensor, DTensor) and {o for o, _ in _parts(tensor, self.writer)} != {self.writer}

    def _memory(self) -> _Memory | None:
        if self.memory is None and self.files:
            sizes = [sum(_padded(t) for t in self._distinct(f).values() if self._is_awaited(t)) for f in self.files]
            self.memory = torch.empty(max(sizes), dtype=torch.uint8)
        return None if self.memory is None else _Memory(self.memory)

    def _room(self, tensor: Any, memory: _Memory | None) -> Any:
        """Return the tensor itself where this rank holds all of it, else room for it."""
        if self._is_awaited(tensor):
            return torch.empty(tensor.shape, dtype=tensor.dtype) if memory is None else memory.take(tensor)
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        return tensor.detach().cpu().contiguous() if isinstance(tensor, Tensor) else tensor

    def _fill(self, whole: Tensor, tensor: DTensor) -> None:
        for owner, block in _parts(tensor, self.writer):
            part = whole[block.in_whole]
            if owner == self.writer:
                part.copy_(tensor.to_local().detach()[block.in_local])
                continue
            direct = part.is_contiguous() and self.device.type == "cpu"
            buffer = part if direct else torch.empty(part.shape, dtype=part.dtype, device=self.device)
            dist.recv(_bytes(buffer), owner)
            if not direct:
                part.copy_(buffer)


@dataclass(slots=True)
class _Memory:
    """Memory for the tensors of one file, used again for the next one: allocators would keep more than a file."""

    free: Tensor

    def take(self, tensor: Tensor) -> Tensor:
        """Return room for a tensor like ``tensor``."""
        taken, self.free = self.free[: _padded(tensor)], self.free[_padded(tensor) :]
        return taken[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // 64) * 64  # bytes, so that every tensor starts where its dtype may


def _bytes(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as bytes: backends differ in the dtypes they carry."""
    return tensor.view(-1).view(torch.uint8)


def _parts(tensor: DTensor, writer: int) -> Iterator[tuple[int, Block]]:
    """Yield (owner, box) for the parts that make up ``tensor``, in the same order on all ranks.

    Of the copies of a part, the one that is nearest the writer is taken: on its own coordinate of every axis that
    replicates. Nothing is yielded on a mesh that the writer is not on.
    """
    ranks = tensor.device_mesh.mesh
    for home in (ranks == writer).nonzero().tolist():
        split = [split_dim(placement) is not None for placement in tensor.placements]
        ways = [range(n) if s else (h,) for n, s, h in zip(ranks.shape, split, home, strict=True)]
        for coordinate in itertools.product(*ways):
            for block in blocks_of(spec_of(tensor), coordinate):
                yield int(ranks[coordinate]), block
