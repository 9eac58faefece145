"""Reading a checkpoint without running anything that is written in it.

DCP's index, ``.metadata``, is a pickle: it is read by an unpickler that knows the few classes which describe tensors
and no others. The tensors themselves are read by ``torch.load`` with ``weights_only``, everything else is JSON.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from shardcore._progress import Progress
from shardcore.agree.fingerprint import checksum
from shardcore.checkpoint.dcp import reads
from shardcore.checkpoint.folders import check_index, checksum_of, damaged, find, read_index, telling
from shardcore.checkpoint.values import decoded
from shardcore.errors import CheckpointError

_DCP = "torch.distributed.checkpoint"

# What describes tensors in ``.metadata``, besides dtypes.
_ALLOWED = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise CheckpointError(f".metadata names {module}.{name}, which describes no tensor; it is not what DCP writes")


def _member(kind: Any, name: str) -> Any:
    """Return a member of an enumeration: pickles of Python 3.11.0 to 3.11.2 name ``getattr`` for that."""
    if not isinstance(kind, EnumType) or name not in kind.__members__:
        raise CheckpointError(
            f".metadata asks {kind!r} for {name!r}, which describes no tensor; DCP writes no such thing"
        )
    return kind[name]


def _metadata(data: bytes) -> Metadata:
    """Return what ``.metadata`` says, of its bytes."""
    try:
        metadata: Metadata = _Unpickler(io.BytesIO(data)).load()
        _check(metadata)
    except CheckpointError:
        raise
    except Exception as error:  # of a damaged pickle: nearly any
        raise CheckpointError(f".metadata cannot be read: {type(error).__name__}: {error}") from error
    return metadata


def _check(metadata: Any) -> None:
    """Refuse an index whose entries are not what DCP writes, or lie outside of the folder."""
    entries = getattr(metadata, "state_dict_metadata", None)
    places = getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(entries, dict) or not isinstance(places, dict):
        raise CheckpointError(".metadata is not the index of a checkpoint")
    for key, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointError(f".metadata says that {key} is no tensor; only tensors are read")
        if any(MetadataIndex(key, chunk.offsets) not in places for chunk in entry.chunks):
            raise CheckpointError(f".metadata does not say where all parts of {key} are")
    for info in places.values():
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f".metadata names a file outside of the checkpoint: {info.relative_path}")


class _Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: io.BufferedReader, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._length)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        count = self._file.readinto(memoryview(buffer)[: max(0, self._length - self._at)])
        self._at += count
        return count


class Checkpoint:
    """One complete checkpoint, to be looked at or read by a single process, whatever it was written by.

    No process group, no model and no accelerator is needed; what is read is as large as what is asked for.

    Args:
        where: the checkpoint, or a folder of them, of which the newest complete one is taken.
        verify: compare what is read with the checksums in the index, which one of an older release lacks.

    Attributes:
        path: its folder.
        step: its step.
        index: what its index says, undecoded: sizes of files, axes of the mesh, parameter groups.
        tensors: shape and dtype of every tensor by name: ``model.NAME`` or ``optimizer.state.NAME.KEY``.

    Raises:
        CheckpointError: it is not complete or damaged.
    """

    def __init__(self, where: str | Path, *, verify: bool = True) -> None:
        self.path = find(where)
        self.index = read_index(self.path)
        if verify:
            check_index(self.path, self.index)
        self._checksums: dict[str, Any] = self.index.get("checksums", {}) if verify else {}
        self.step = int(self.index["step"])
        self.metadata = _metadata(self._read(".metadata"))
        found: dict[str, Any] = self.metadata.state_dict_metadata
        self.tensors = {key: (entry.size, entry.properties.dtype) for key, entry in found.items()}

    def _read(self, name: str) -> bytes:
        """Return what a small file holds."""
        with telling(f"reading {self.path}"):
            data = (self.path / name).read_bytes()
        if name in self._checksums and checksum_of(data) != self._checksums[name]:
            raise CheckpointError(damaged(self.path, name))
        return data

    def value(self, name: str) -> Any:
        """Return what was saved under ``name`` besides tensors, None if nothing was: ``"extra"``, ``"scheduler"``."""
        return decoded(self.index.get(name))

    def of_rank(self, position: int) -> dict[str, Any]:
        """Return what the rank at ``position`` saved of its own: its generators and the position of its loader."""
        data = self._read(f"rank-{position}.json")
        try:
            found: dict[str, Any] = decoded(json.loads(data))
        except ValueError as error:
            raise CheckpointError(f"{self.path}/rank-{position}.json is damaged: {error}") from error
        return found

    def names(self, prefix: str = "model.") -> Iterator[str]:
        """Yield the names of the tensors that begin with ``prefix``, without it."""
        return (key.removeprefix(prefix) for key in self.tensors if key.startswith(prefix))

    def bytes_of(self, key: str) -> int:
        """Return the size of a whole tensor, in bytes."""
        size, dtype = self.tensors[key]
        return int(math.prod(size) * dtype.itemsize)

    def read(self, key: str) -> Tensor:
        """Return a whole tensor, on the CPU."""
        size, dtype = self.tensors[key]
        whole = torch.empty(size, dtype=dtype)
        self.fill({key: whole})
        return whole

    def fill(self, targets: Mapping[str, Tensor], *, shown: bool = False) -> None:
        """Read into the ``targets``, of which DTensors get the part that is here; their names, shapes and dtypes fit.

        Raises:
            CheckpointError: a part is missing or damaged. Some of the targets may have been filled.
        """
        taken = reads(targets, self.metadata)
        total = sum(target.nbytes for of_part in taken.values() for target, _ in of_part)
        with (
            Progress(total, f"reading {self.path.name}", shown=shown) as progress,
            telling(f"reading {self.path}"),
            # A part is compared while the next one is read.
            ThreadPoolExecutor(1) as helper,
        ):
            compared: Future[Any] = helper.submit(int)  # nothing yet
            for index, part in self._parts(taken):
                compared.result()
                compared = helper.submit(self._compare, index, part)
                for target, box in taken[index]:
                    found = part[box]
                    if (found.shape, found.dtype) != (target.shape, target.dtype):
                        raise CheckpointError(
                            f"a part of {self.path} is damaged: {index.fqn} is {part.dtype} {tuple(part.shape)}"
                        )
                    target.copy_(found)
                    progress.advance(target.nbytes)
            compared.result()

    def _parts(self, wanted: Iterable[MetadataIndex]) -> Iterator[tuple[MetadataIndex, Tensor]]:
        """Read parts, file by file and in the order that they have there."""
        places = self.metadata.storage_data
        by_file = sorted(wanted, key=lambda index: (places[index].relative_path, places[index].offset))
        for name, indices in itertools.groupby(by_file, key=lambda index: places[index].relative_path):
            with (self.path / name).open("rb") as file:
                for index in indices:
                    yield index, self._part(file, places[index])

    def _part(self, file: io.BufferedReader, place: Any) -> Tensor:
        try:
            piece = io.BufferedReader(_Slice(file, place.offset, place.length))
            part = torch.load(piece, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:  # of a damaged pickle: nearly any
            raise CheckpointError(f"a part of {self.path} is damaged: {type(error).__name__}: {error}") from error
        if not isinstance(part, Tensor):
            raise CheckpointError(f"a part of {self.path} is damaged: it is a {type(part).__name__}, and no tensor")
        return part

    def _compare(self, index: MetadataIndex, part: Tensor) -> None:
        """Refuse a part that is not what was saved."""
        place = self.metadata.storage_data[index]
        expected = self._checksums.get(place.relative_path, {}).get(str(place.offset))
        if expected is not None and checksum(part) != expected:
            told = damaged(self.path, f"{index.fqn} in {place.relative_path}")
            raise CheckpointError(f"{told} The model holds some of its values by now")
