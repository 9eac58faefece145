"""One rank that writes for all, the *writer*; the others follow it, and send it what they hold of each tensor.

The writer tells its progress in the store of the process group, so that its failure reaches all; and while it writes,
however slowly, a thread of it counts there, so that one that was killed or stopped is noticed.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from shardcore.agree.store_barrier import POLL, StoreBarrier, limit_of_waiting, wait_for
from shardcore.comm.dtensor_params import local_tensor
from shardcore.comm.parts import Block, copies_of
from shardcore.comm.raw import as_bytes
from shardcore.errors import AgreementError, MissingRanksError
from shardcore.mesh.axes import device_type_of

_BEAT = 1.0  # seconds between two signs of life of the writer, at most
_FAREWELL = 30.0  # seconds that the writer waits for others to hear its last word, at most: one may have been killed


@dataclass(slots=True)
class WriterBarrier(StoreBarrier):
    """All ranks of a model in the same call, in which one of them writes."""

    step: int = 0  # how often the writer has told the others to go on

    def proceed(self) -> None:
        """On the writer: tell the others to go on."""
        self.store.set(f"{self.name}/step{self.step}", "")
        self.step += 1

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """On the writer: give signs of life, and tell the others of the end, or of an error; returns when all know.

        Without torchrun the store ends with the process of the first rank, which may be the writer.
        """
        done = threading.Event()
        beat = threading.Thread(target=self._beat, args=(done,), daemon=True)
        beat.start()
        try:
            yield
        except BaseException as error:  # an interrupt too: the others wait
            self.store.set(f"{self.name}/step{self.step}", f"{type(error).__name__}: {error}")
            self.step += 1
            raise
        else:
            self.proceed()
        finally:
            done.set()
            beat.join()
            self._see_off()

    def _see_off(self) -> None:
        end = time.monotonic() + _FAREWELL
        # A store that is gone says so where it is used: here it would hide what the writer failed of.
        with contextlib.suppress(RuntimeError, OSError):
            while (
                self.store.add(f"{self.name}/followed", 0) < self.step * (len(self.reports) - 1)
                and time.monotonic() < end
            ):
                time.sleep(POLL / 10)

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
        patience, beats = limit_of_waiting(), -1
        while True:
            end = time.monotonic() + patience
            while not wait_for(self.store, key, min(end, time.monotonic() + _BEAT)):
                known, beats = beats, self.store.add(f"{self.name}/beat", 0)
                if beats != known:
                    break
                if time.monotonic() > end:
                    raise MissingRanksError(_GONE.format(writer=writer, seconds=patience), (writer,))
            else:
                break
        self.step += 1
        error = self.store.get(key).decode()
        self.store.add(f"{self.name}/followed", 1)
        if error:
            raise AgreementError(f"rank {writer} failed to save the model. Its error: {error}")


_GONE = (
    "rank {writer}, which writes the model for all, has given no sign of life for {seconds:g} s (the timeout of the "
    "process group): it was killed or stopped, or cannot be reached. The folder holds the earlier checkpoint, or the "
    "new one; start the job again."
)


class Transport:
    """Brings tensors to the writer, part by part.

    Args:
        tensors: this rank's part of every tensor by name; what is not a DTensor is taken from the writer.
        writer: the global rank that gathers.
        reuses: what is gathered may lie where the one before it was: allocators would keep more than a file.
    """

    def __init__(self, tensors: Mapping[str, Any], writer: int, *, reuses: bool = False) -> None:
        self._tensors, self._writer, self._device = tensors, writer, torch.device(device_type_of())
        self._memory = torch.empty(0, dtype=torch.uint8) if reuses else None

    def send(self, names: Iterable[str]) -> None:
        """On the other ranks: send this rank's parts of the tensors ``names``."""
        for tensor in self._distinct(names).values():
            for owner, block in self._parts(tensor):
                if owner == dist.get_rank():
                    part = local_tensor(tensor).detach()[block.in_local]
                    dist.send(as_bytes(part.to(self._device).contiguous()), self._writer)

    def gather(self, names: Collection[str], ready: Callable[[], None]) -> dict[str, Any]:
        """On the writer: return the whole tensors ``names``, on the CPU.

        One tensor under two names arrives once. ``ready`` is called when there is room for all, before any is awaited.
        """
        distinct = self._distinct(names)
        awaited = {
            key: value
            for key, value in distinct.items()
            if isinstance(value, DTensor) and {owner for owner, _ in self._parts(value)} != {self._writer}
        }
        whole = {key: _on_cpu(value) for key, value in distinct.items() if key not in awaited}
        whole |= zip(awaited, self._rooms(list(awaited.values())), strict=True)
        ready()
        for key, tensor in awaited.items():
            self._fill(whole[key], tensor)
        return {name: whole[id(self._tensors[name])] for name in names}

    def _distinct(self, names: Iterable[str]) -> dict[int, Any]:
        return {id(self._tensors[name]): self._tensors[name] for name in names}

    def _parts(self, tensor: Any) -> Iterator[tuple[int, Block]]:
        """Yield (owner, box) for the parts that make up a DTensor, in the same order on all ranks.

        Of the copies of a part, the one that is nearest the writer is taken: on its own coordinate of every axis that
        replicates. Nothing is yielded on a mesh that the writer is not on.
        """
        if isinstance(tensor, DTensor):
            for home in (tensor.device_mesh.mesh == self._writer).nonzero().tolist():
                yield from copies_of(tensor, home)

    def _rooms(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return room for each of ``tensors``."""
        if self._memory is None:
            return [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        # A multiple of 64 bytes for each, so that every tensor starts where its dtype may.
        ends = list(itertools.accumulate((-(-tensor.nbytes // 64) * 64 for tensor in tensors), initial=0))
        if self._memory.numel() < ends[-1]:
            self._memory = self._memory.new_empty(0)  # before there is more
            self._memory = self._memory.new_empty(ends[-1])
        memory = [self._memory[at : at + t.nbytes] for at, t in zip(ends, tensors, strict=False)]
        return [room.view(t.dtype).view(t.shape) for room, t in zip(memory, tensors, strict=True)]

    def _fill(self, whole: Tensor, tensor: DTensor) -> None:
        for owner, block in self._parts(tensor):
            part = whole[block.in_whole]
            if owner == self._writer:
                part.copy_(local_tensor(tensor).detach()[block.in_local])
                continue
            direct = part.is_contiguous() and self._device.type == "cpu"
            buffer = part if direct else torch.empty(part.shape, dtype=part.dtype, device=self._device)
            dist.recv(as_bytes(buffer), owner)
            if not direct:
                part.copy_(buffer)


def _on_cpu(value: Any) -> Any:
    """Return a tensor of which this rank holds all; anything else as it is."""
    return local_tensor(value).detach().cpu().contiguous() if isinstance(value, Tensor) else value
