"""Reading a checkpoint without running anything that is written in it.

DCP's index, ``.metadata``, is a pickle: it is read by an unpickler that knows the few classes which describe tensors
and no others. The tensors themselves are read by ``torch.load`` with ``weights_only``, everything else is JSON.
"""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from enum import EnumType
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardcore._progress import Progress
from shardcore.checkpoint.chunks import Reading, reads
from shardcore.checkpoint.folders import find, read_index, telling
from shardcore.checkpoint.values import decoded
from shardcore.errors import CheckpointError

__all__ = ["Checkpoint"]

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


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            with (Path(self.path) / ".metadata").open("rb") as file:
                metadata: Metadata = _Unpickler(file).load()
        except CheckpointError:
            raise
        except Exception as error:  # of a damaged pickle: nearly any
            raise CheckpointError(f".metadata cannot be read: {type(error).__name__}: {error}") from error
        _check(metadata)
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
    for info in places.values():
        if Path(info.relative_path).name != info.relative_path:
            raise CheckpointError(f".metadata names a file outside of the checkpoint: {info.relative_path}")


class Checkpoint:
    """One complete checkpoint, to be looked at or read by a single process, whatever it was written by.

    No process group, no model and no accelerator is needed; what is read is as large as what is asked for.

    Args:
        where: the checkpoint, or a folder of them, of which the newest complete one is taken.

    Attributes:
        path: its folder.
        step: its step.
        index: what its index says, undecoded: sizes of files, axes of the mesh, parameter groups.
        tensors: shape and dtype of every tensor by name: ``model.NAME`` or ``optimizer.state.NAME.KEY``.

    Raises:
        CheckpointError: it is not complete or damaged.
    """

    def __init__(self, where: str | Path) -> None:
        self.path = find(where)
        self.index = read_index(self.path)
        self.step = int(self.index["step"])
        self._reader = _Reader(str(self.path))
        self.metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self.metadata, True)
        found: dict[str, Any] = self.metadata.state_dict_metadata
        self.tensors = {key: (entry.size, entry.properties.dtype) for key, entry in found.items()}

    def value(self, name: str) -> Any:
        """Return what was saved under ``name`` besides tensors, None if nothing was: ``"extra"``, ``"scheduler"``."""
        return decoded(self.index.get(name))

    def of_rank(self, position: int) -> dict[str, Any]:
        """Return what the rank at ``position`` saved of its own: its generators and the position of its loader."""
        with telling(f"reading {self.path}"):
            text = (self.path / f"rank-{position}.json").read_text(encoding="utf-8")
        try:
            found: dict[str, Any] = decoded(json.loads(text))
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
        plan = reads(targets, self.metadata)
        total = sum(math.prod(item.lengths) * targets[item.dest_index.fqn].element_size() for item in plan.items)
        with Progress(total, f"reading {self.path.name}", shown=shown) as progress, telling(f"reading {self.path}"):
            try:
                self._reader.read_data(plan, Reading(targets, progress)).wait()
            except (pickle.UnpicklingError, zipfile.BadZipFile, RuntimeError, ValueError, KeyError, EOFError) as error:
                raise CheckpointError(f"a part of {self.path} is damaged: {type(error).__name__}: {error}") from error
