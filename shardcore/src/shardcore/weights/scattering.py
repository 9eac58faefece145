"""Ways to bring the values of recipes to the ranks that hold their parts."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from shardcore.comm.raw import as_bytes
from shardcore.errors import AgreementError, ConfigError
from shardcore.mesh import device_type_of
from shardcore.weights.boxes import Reader
from shardcore.weights.recipes import Box, Recipe, reads_files

__all__ = ["Need", "Place", "Scatter", "Slices"]

#: A box of a tensor and where it is in this rank's part.
Place: TypeAlias = tuple[Box, Any]


@dataclass(frozen=True, slots=True)
class Need:
    """What one rank holds of a tensor that is read from files.

    Attributes:
        name: of the tensor.
        dtype: that the rank holds it in.
        boxes: the parts, sorted.
    """

    name: str
    dtype: torch.dtype
    boxes: tuple[Box, ...]


class Slices:
    """Every rank reads its own boxes. A context manager around the filling of a model."""

    #: Whether a part may stay in the file where it lies as it is needed.
    keeps_mapped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def write(self, recipe: Recipe, places: Sequence[Place], local: Tensor) -> None:
        """Write the boxes of the tensor of ``recipe`` to their places in ``local``."""
        reader = Reader()
        for box, place in places:
            local[place].copy_(reader.read(recipe, box))


class Scatter(Slices):
    """One of some ranks reads for all of them; only it touches the files. All of them fill models that are split alike.

    Before each box the reading rank says whether it comes, so that its failure ends the others. A rank that fails while
    it is given boxes takes the rest of them and throws them away, so that nobody waits for it.

    Args:
        ranks: the global ranks, this one among them; the first one reads.
        needs: what this rank is given, in the order of the calls of `write`.
    """

    keeps_mapped = False

    def __init__(self, ranks: Sequence[int], needs: Sequence[Need]) -> None:
        self._reader, *self._others = ranks
        self._needs = list(needs)
        self._reads = dist.get_rank() == self._reader
        self._peers: dict[int, _Peer] = {}
        self._device = torch.device(device_type_of())
        self._served = 0  # tensors that this rank has read for all
        self._coming = deque((box, need.dtype) for need in needs for box in need.boxes)  # what this rank is given

    @override
    def __enter__(self) -> Self:
        if not self._reads:
            dist.send_object_list([self._needs], dst=self._reader, device=self._device)
            return self
        for rank in self._others:
            received: list[Any] = [None]
            dist.recv_object_list(received, src=rank, device=self._device)
            self._peers[rank] = _Peer(rank, received[0])
        try:
            self._compare()
        except BaseException as error:
            self._tell(error)
            raise
        return self

    def _compare(self) -> None:
        own = [(need.name, need.dtype) for need in self._needs]
        for peer in self._peers.values():
            other = [(need.name, need.dtype) for need in peer.needs]
            if other != own:
                name, dtype = next(pair for pair in (*other, *own) if pair not in own or pair not in other)
                raise ConfigError(
                    f"ranks {self._reader} and {peer.rank} do not load the same tensors: only one of them has {name} "
                    f"as {dtype}. Load the same model on every rank"
                )

    @override
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            return
        if self._reads:
            self._tell(error)
        else:
            self._drain()

    def _tell(self, error: BaseException) -> None:
        """Tell the ranks that still wait for a box."""
        message = f"{type(error).__name__}: {error}".encode()
        for peer in self._peers.values():
            if peer.left:
                with contextlib.suppress(RuntimeError):  # it is gone; the others have to know all the same
                    dist.send(self._number(len(message)), peer.rank)
                    dist.send(torch.frombuffer(bytearray(message), dtype=torch.uint8).to(self._device), peer.rank)

    def _drain(self) -> None:
        with contextlib.suppress(RuntimeError, AgreementError):  # what failed first is what is told
            while self._coming:
                box, dtype = self._coming[0]
                self._receive(torch.empty([stop - start for start, stop in box], dtype=dtype, device=self._device))

    @override
    def write(self, recipe: Recipe, places: Sequence[Place], local: Tensor) -> None:
        if not reads_files(recipe):
            super().write(recipe, places, local)
            return
        if self._reads:
            self._served += 1
            self._serve(self._served - 1, recipe, places, local)
            return
        for _, place in sorted(places, key=lambda pair: pair[0]):
            part = local[place]
            direct = part.is_contiguous() and part.device == self._device
            arrived = part if direct else torch.empty(part.shape, dtype=part.dtype, device=self._device)
            self._receive(arrived)
            if not direct:
                part.copy_(arrived)

    def _serve(self, number: int, recipe: Recipe, places: Sequence[Place], local: Tensor) -> None:
        reader, own = Reader(), dict(places)
        asked = {rank: peer.needs[number].boxes for rank, peer in self._peers.items()}
        sent: list[Any] = []
        for box in sorted({*own, *(box for boxes in asked.values() for box in boxes)}):
            part = reader.read(recipe, box).to(local.dtype)
            receivers = [rank for rank, boxes in asked.items() if box in boxes]
            if receivers:
                part = part.to(self._device).contiguous()
            _wait(sent)  # one box is made while another is on its way
            for rank in receivers:
                self._peers[rank].left -= 1
                sent += [(dist.isend(message, rank), message) for message in (self._number(0), as_bytes(part))]
            if box in own:
                local[own[box]].copy_(part)
        _wait(sent)

    def _receive(self, part: Tensor) -> None:
        """Let the next box that comes from the reading rank be written to ``part``, which is contiguous.

        Raises:
            AgreementError: it failed.
        """
        self._coming.popleft()
        length = self._number(0)
        dist.recv(length, self._reader)
        if size := int(length.item()):
            self._coming.clear()
            message = torch.empty(size, dtype=torch.uint8, device=self._device)
            dist.recv(message, self._reader)
            raise AgreementError(
                f"rank {self._reader}, which reads the files for the ranks of its host, failed. Its error: "
                f"{bytes(message.tolist()).decode()}"
            )
        dist.recv(as_bytes(part), self._reader)

    def _number(self, value: int) -> Tensor:
        return torch.tensor([value], dtype=torch.int64, device=self._device)


@dataclass(slots=True)
class _Peer:
    """A rank that is given boxes.

    Attributes:
        rank: its global number.
        needs: what it is given.
        left: the number of boxes that it still waits for.
    """

    rank: int
    needs: Sequence[Need]
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = sum(len(need.boxes) for need in self.needs)


def _wait(sent: list[Any]) -> None:
    while sent:
        work, _ = sent.pop(0)
        work.wait()
