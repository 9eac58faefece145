"""Checkpoints of safetensors files: which tensors they hold, and reading boxes of them."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardcore.errors import ConfigError
from shardcore.weights.recipes import Box, Source, slices

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

_LENGTH = 8  # bytes at the start of a file, which say how long its header is
_LENT = 16 * 2**20  # bytes that are looked at before a file is mapped anew

#: Dtypes by the names that safetensors files use.
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_SOME = 1024  # bytes of each tensor that ranks compare


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int  # where it begins in the file, in bytes

    @property
    def nbytes(self) -> int:
        """Its bytes in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def is_aligned(self) -> bool:
        """Whether its values can be used where they lie; the safetensors library writes them so, others may not."""
        return self.begin % self.dtype.itemsize == 0


@dataclass(slots=True)
class Files:
    """The tensors of one checkpoint. Files are mapped when they are read, and given up with `close`.

    A file is mapped twice: once for what is kept where it lies, and once for what is copied, anew after some bytes,
    since pages that were looked at count as this process's as long as their mapping is there.
    """

    place: str  # what the user named, for messages
    tensors: dict[str, Stored]  # by key, in the order of the files
    _kept: dict[Path, Tensor] = field(default_factory=dict, repr=False)
    _lent: _Lent | None = field(default=None, repr=False)

    @classmethod
    def at(cls, place: str | Path | Sequence[str | Path], *, variant: str | None = None) -> Files:
        """Return the tensors of a file, of several, or of a folder; only headers are read.

        Args:
            place: a ``.safetensors`` file, a list of them, or a folder: with ``model.safetensors``, with
                ``model.safetensors.index.json``, or with ``.safetensors`` files that have different keys.
            variant: a part of their names: ``"fp16"`` takes ``model.fp16.safetensors``.

        Raises:
            ConfigError: there is none, a file cannot be read or is cut short, a key is in none or in several files.
        """
        tensors: dict[str, Stored] = {}
        for file, keys in _files(place, variant):
            found = dict(_header(file))
            # Of an indexed checkpoint whole files are read in the order of their names: the last one wins.
            if keys is None and (again := sorted(found.keys() & tensors.keys())):
                first = tensors[again[0]].file
                raise ConfigError(f"{again[0]} is in two files: {first} and {file}; name the files to read")
            tensors |= found
            if keys is not None and (lost := sorted(keys - found.keys())):
                raise ConfigError(
                    f"{file} lacks {lost[0]}, which the index of the checkpoint promises there ({len(lost)} such); "
                    "download or copy the file again"
                )
        return cls(str(place), tensors)

    @property
    def digest(self) -> str:
        """A hash over names, shapes, dtypes, and some values of each tensor, wherever the files are.

        Hosts may have copies of other revisions of a checkpoint, whose headers are equal.
        """
        hashed = hashlib.sha256()
        opened: dict[Path, Any] = {}
        with contextlib.ExitStack() as stack:
            for key, stored in sorted(self.tensors.items()):
                if stored.file not in opened:
                    opened[stored.file] = stack.enter_context(stored.file.open("rb"))
                file = opened[stored.file]
                hashed.update(f"{key} {list(stored.shape)} {stored.dtype}".encode())
                file.seek(stored.begin + max(stored.nbytes - _SOME, 0) // 2)  # the middle of the tensor
                hashed.update(file.read(min(_SOME, stored.nbytes)))
        return hashed.hexdigest()

    def source(self, key: str) -> Source:
        """Return the tensor ``key`` as a recipe."""
        stored = self.tensors[key]
        keep = functools.partial(self.keep, key) if stored.is_aligned else None
        return Source(stored.shape, stored.dtype, functools.partial(self.read, key), keep)

    def read(self, key: str, box: Box) -> Tensor:
        """Return a box of a tensor to be copied: a view of the file, whose pages count until it is given up."""
        stored = self.tensors[key]
        if self._lent is None or self._lent.file != stored.file or self._lent.looked_at > _LENT:
            self._lent = None  # before the next one: nobody else may hold it
            self._lent = _Lent(stored.file, _mapped(stored.file, key))
        rows = (box[0][1] - box[0][0]) / max(stored.shape[0], 1) if box else 1
        self._lent.looked_at += int(rows * stored.nbytes)
        return _box(self._lent.bytes, stored, box)

    def keep(self, key: str, box: Box) -> Tensor:
        """Return a box of an aligned tensor as a view of the file that can be kept, and written to.

        Nothing of it is looked at.
        """
        stored = self.tensors[key]
        if stored.file not in self._kept:
            self._kept[stored.file] = _mapped(stored.file, key)
        return _box(self._kept[stored.file], stored, box)

    def close(self) -> None:
        """Give up the files; what was kept of them stays."""
        self._kept.clear()
        self._lent = None


@dataclass(slots=True)
class _Lent:
    """A file that is mapped to be copied from."""

    file: Path
    bytes: Tensor  # all of it
    looked_at: int = 0  # the bytes that were read since, at most


def _mapped(file: Path, key: str) -> Tensor:
    """Return the bytes of a file in a private mapping: writing to them changes this process's copy of the page."""
    try:
        return torch.from_file(str(file), shared=False, size=file.stat().st_size, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{file} could not be read while {key} was loaded: {error}") from error


def _box(file: Tensor, stored: Stored, box: Box) -> Tensor:
    stop = stored.begin + stored.nbytes
    if stop > file.numel():
        raise ConfigError(
            f"{stored.file} has become shorter than its header says: {file.numel()} bytes, and a tensor ends at "
            f"{stop}. Leave the files of a checkpoint alone while it is loaded"
        )
    values = file[stored.begin : stop]
    if not stored.is_aligned:
        values = values.clone()
    values = values.view(stored.dtype).view(stored.shape)
    return values[slices(box)] if box else values


def indexed(folder: Path, single: str, index: str, variant: str | None) -> Iterator[tuple[Path, frozenset[str] | None]]:
    """Yield the files of a checkpoint in a folder: the one of the name ``single``, else those that an ``index`` names.

    With each come the keys that the index promises there, or None. A ``variant`` is a part of names: ``"fp16"``.
    """
    one, several = (folder / _with_variant(name, variant) for name in (single, index))
    if one.is_file():
        yield one, None
    elif several.is_file():
        yield from ((folder / name, keys) for name, keys in _indexed(several).items())


def _files(
    place: str | Path | Sequence[str | Path], variant: str | None
) -> Iterator[tuple[Path, frozenset[str] | None]]:
    """Yield the files of a checkpoint with the keys that are taken from each, None for all of them."""
    if not isinstance(place, str | Path):
        if not place:
            raise ConfigError("no file was named to read weights from")
        yield from ((Path(file), None) for file in place)
        return
    path = Path(place)
    if not path.is_dir():
        if path.suffix != ".safetensors":
            raise ConfigError(
                f"{path} is {'no .safetensors file' if path.exists() else 'not there'}; weights are read from a "
                ".safetensors file, from a list of them, or from a folder that holds them"
            )
        yield path, None
        return
    if chosen := list(indexed(path, _SINGLE, _INDEX, variant)):
        yield from chosen
        return
    found = sorted(path.glob("*.safetensors"))
    if not found or variant is not None:
        single, index = (_with_variant(name, variant) for name in (_SINGLE, _INDEX))
        raise ConfigError(
            f"{path} holds no {single} and no {index}{_pickled(path)}; give a folder with weights in safetensors files"
        )
    yield from ((file, None) for file in found)


def _with_variant(name: str, variant: str | None) -> str:
    """Return a name with a variant, which comes before the last part."""
    start, _, end = name.rpartition(".")
    return name if variant is None else f"{start}.{variant}.{end}"


def _pickled(folder: Path) -> str:
    files = sorted(folder.glob("*.bin"))
    return f", but {files[0].name}, which is pickled" if files else ""


def _indexed(index: Path) -> dict[str, frozenset[str]]:
    """Return the keys of each file that an index names."""
    try:
        places: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ConfigError(f"{index} is no index of a checkpoint: {type(error).__name__}: {error}") from error
    if bad := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise ConfigError(f"{index} names {bad[0]!r}, which is not in its own folder")
    return {name: frozenset(key for key, file in places.items() if file == name) for name in names}


def _header(file: Path) -> list[tuple[str, Stored]]:
    """Return the tensors of a file, which is complete."""
    try:
        with safe_open(file, framework="pt", device="cpu") as handle:  # refuses what is damaged or cut short
            keys = handle.keys()
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH), "little")
            header = json.loads(opened.read(length))
        return [(key, _stored(file, key, header[key], _LENGTH + length)) for key in keys]
    except (OSError, SafetensorError, ValueError, LookupError) as error:
        size = f"{file.stat().st_size} bytes" if file.is_file() else "not there"
        raise ConfigError(
            f"{file} ({size}) cannot be read as a safetensors file: {error}. It has to be whole, and to be seen by "
            "every rank; download or copy it again"
        ) from error


def _stored(file: Path, key: str, told: Mapping[str, Any], begin: int) -> Stored:
    """Return what the header of ``file``, whose tensors begin after so many bytes, tells of the tensor ``key``."""
    if (name := told["dtype"]) not in _DTYPES:
        raise ConfigError(f"{key} has the dtype {name}, which torch has none for; convert the checkpoint first")
    return Stored(file, tuple(told["shape"]), _DTYPES[name], begin + told["data_offsets"][0])
