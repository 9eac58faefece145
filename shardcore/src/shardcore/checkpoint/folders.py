"""The folder of checkpoints: which are there, which of them are complete, and how a new one appears at once.

A checkpoint is written into ``step-N.tmp-ID`` and renamed to ``step-N`` when every part of it is on the disk. Its
index, `INDEX`, is written last and has the size of every file, so that one that was cut short later is noticed as well,
and checksums of what is in them, which are compared when they are read.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardcore.errors import CheckpointError, ShardcoreWarning

INDEX = "shardcore.json"
FORMAT = 1  # of the index; another one is not read

_NAME = re.compile(r"step-(\d+)(\.tmp-\w+)?")

_ABANDONED = 3600.0  # seconds without a change, where a file system has no locks


class Claim:
    """Says that a folder is being written, to whoever would remove it; ends with the process, however that ends."""

    def __init__(self) -> None:
        self._handle: int | None = None

    def take(self, folder: Path) -> None:
        """Claim a new folder."""
        self._handle = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # a file system without locks: others go by the time
            self.give_up()

    def give_up(self) -> None:
        """End it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self.give_up()


def _is_being_written(folder: Path) -> bool:
    """Tell whether a job has claimed a folder; where nobody can know, whether anything has changed there lately."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES) or _is_young(folder)
    else:
        return False
    finally:
        os.close(handle)


def _is_young(folder: Path) -> bool:
    newest = max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    return time.time() - newest < _ABANDONED


@contextmanager
def telling(what: str) -> Iterator[None]:
    """Turn an error of the file system into a `CheckpointError` that says ``what`` was being done."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        found: BaseException | None = error
        while found is not None and not isinstance(found, OSError):  # torch's writer of archives raises one of its own
            found = found.__cause__ or found.__context__
        if found is None:
            raise
        raise CheckpointError(f"{what} failed: {type(found).__name__}: {found}") from error


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Return the newest complete checkpoint of a folder, the one of the largest step; None if there is none.

    Newer ones that are not complete, because a save was cut short or files were lost since, are skipped, each with a
    `ShardcoreWarning` that names it and what is wrong. Looks at names and sizes of files only.

    For one process: hosts may see a shared folder differently at one instant, so ranks must not decide by it each for
    themselves. `load_checkpoint` with ``missing_ok=True`` decides for all of them.

    Args:
        folder: what was given to `save_checkpoint`; it need not exist.
    """
    for step, path in sorted(_entries(Path(folder)), reverse=True):
        if (wrong := problem(path)) is None:
            return path
        warnings.warn(f"checkpoint {path} (step {step}) was skipped: {wrong}", ShardcoreWarning, stacklevel=2)
    return None


def find(where: str | os.PathLike[str]) -> Path:
    """Return the checkpoint ``where``, or the newest complete one in the folder ``where``.

    Raises:
        CheckpointError: it is not complete, or the folder has none that is.
    """
    if (found := find_any(where)) is None:
        raise CheckpointError(
            f"{where} holds no complete checkpoint, and is none; nothing was loaded. Pass a folder that "
            "save_checkpoint has written to. A training that may be the first one of its folder passes "
            "load_checkpoint(..., missing_ok=True)."
        )
    return found


def find_any(where: str | os.PathLike[str]) -> Path | None:
    """Return what `find` does, and None for a folder without a complete checkpoint.

    Raises:
        CheckpointError: the checkpoint that was named is not complete.
    """
    path = Path(where)
    if _NAME.fullmatch(path.name) or (path / INDEX).exists() or (path / ".metadata").exists():
        if (wrong := problem(path)) is not None:
            raise CheckpointError(f"checkpoint {path} cannot be loaded: {wrong}. Nothing was loaded.")
        return path
    return latest(path)


def problem(path: Path) -> str | None:
    """Say what keeps a checkpoint from being complete, or return None."""
    match = _NAME.fullmatch(path.name)
    if match and match[2]:
        return "its save was cut short, or is still running"
    if not path.is_dir():
        return "there is no such folder"
    try:
        index = read_index(path)
    except CheckpointError as error:
        return str(error)
    for name, size in index["files"].items():
        try:
            found = (path / name).stat().st_size
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if found != size:
            return f"{name} has {found} bytes and was written with {size}"
    return None


#: What an index says, where it says it.
_KINDS: dict[str, Any] = {"step": int, "replicas": list, "optimizer": dict | None, "checksums": dict, "axes": dict}


def read_index(path: Path) -> dict[str, Any]:
    """Return the index of a checkpoint.

    Raises:
        CheckpointError: it is not there, damaged, or of a later release.
    """
    try:
        index = json.loads((path / INDEX).read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{INDEX} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{INDEX} is damaged: {error}") from error
    if not isinstance(index, dict) or not isinstance(index.get("files"), dict):
        raise CheckpointError(f"{INDEX} is not the index of a checkpoint")
    for name, kind in _KINDS.items():
        value = index.get(name)
        if name in index and (not isinstance(value, kind) or isinstance(value, bool) or value == []):
            raise CheckpointError(f"{INDEX} is damaged: {name} is {index[name]!r}")
    if index.get("format") != FORMAT:
        raise CheckpointError(
            f"it has the format {index.get('format')!r}, and this release of shardcore reads {FORMAT}"
        )
    return index


def check_index(path: Path, index: dict[str, Any]) -> None:
    """Refuse an ``index`` of the checkpoint ``path`` that has another checksum than it says."""
    if "checksums" in index and index["checksums"].get(INDEX) != _checksum(index):
        raise CheckpointError(damaged(path, INDEX))


def damaged(path: Path, what: str) -> str:
    """Say that something in the checkpoint ``path`` is not what was saved, and what to do."""
    return (
        f"{what} in {path} is not what was saved: it has another checksum, so the file was damaged since, or replaced. "
        "Load another checkpoint, or a copy of this one; load_checkpoint(..., verify=False) takes it as it is."
    )


def checksum_of(data: bytes) -> str:
    """Return the checksum of a file that is no part of tensors."""
    return hashlib.sha256(data).hexdigest()[:16]


def _checksum(index: dict[str, Any]) -> str:
    others = {name: value for name, value in index["checksums"].items() if name != INDEX}
    return checksum_of(json.dumps({**index, "checksums": others}).encode())


def _entries(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of everything in ``folder`` that has the name of a checkpoint."""
    if not folder.is_dir():
        return []
    return [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]


def begin(folder: Path, step: int | None, claim: Claim) -> tuple[Path, Path]:
    """Make and claim the folder that a new checkpoint is written into; return it and the one that it becomes.

    Without a ``step`` it is the one after the newest. Another job that is writing into the same folder is told of.

    Raises:
        CheckpointError: there is one of that step, or the folder cannot be made.
    """
    with telling(f"making a folder for a checkpoint in {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        if step is None:
            step = max((known for known, _ in _entries(folder)), default=-1) + 1
        final = folder / f"step-{step}"
        _refuse(final)
        staging = folder / f"{final.name}.tmp-{secrets.token_hex(4)}"
        staging.mkdir()
        claim.take(staging)
        for _, other in _entries(folder):
            if ".tmp-" in other.name and other != staging and _is_being_written(other):
                warnings.warn(
                    f"another job is writing {other}: what both save is kept or removed by the steps of both. Give "
                    "each job a folder of its own, or end the other one",
                    ShardcoreWarning,
                    stacklevel=2,
                )
    return staging, final


def _refuse(final: Path) -> None:
    if final.exists():
        raise CheckpointError(
            f"{final} exists, and nothing is ever written into an existing checkpoint; nothing was written. Pass "
            "another step=, or remove it."
        )


def complete(staging: Path, final: Path, index: dict[str, Any], parts: dict[str, dict[str, str]]) -> None:
    """Write the index of a checkpoint of which all parts are on the disk, and give it its name.

    ``index`` is what is to be known of it besides its files; ``parts`` are checksums of what files of tensors hold, by
    their names and the place in them.

    Raises:
        CheckpointError: somebody else has made one of that name since, or a file cannot be seen from here.
    """
    with telling(f"completing {final}"):
        paths = sorted(staging.iterdir())
        files = {path.name: path.stat().st_size for path in paths}
        others = {path.name: checksum_of(path.read_bytes()) for path in paths if path.name not in parts}
        whole = {**index, "format": FORMAT, "files": files, "checksums": {**parts, **others}}
        whole["checksums"][INDEX] = _checksum(whole)
        write_json(staging / INDEX, whole)
        sync(staging)
        _refuse(final)
        staging.rename(final)
        sync(final.parent)


def prune(newest: Path, keep_last: int | None) -> None:
    """Remove what earlier saves left unfinished and, with ``keep_last``, all but so many complete checkpoints.

    What another job is writing stays, and ``newest``, which was just written. One that is removed loses its name first,
    so that what a process that is killed meanwhile leaves of it is no checkpoint.
    """
    folder, kept = newest.parent, 1
    for _, path in sorted(_entries(folder), reverse=True):
        try:
            if ".tmp-" in path.name:
                if not _is_being_written(path):
                    shutil.rmtree(path)
            elif keep_last is not None and path != newest and problem(path) is None:
                kept += 1
                if kept > keep_last:
                    doomed = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
                    path.rename(doomed)
                    shutil.rmtree(doomed)
        except FileNotFoundError:
            continue  # another job has removed it
        except OSError as error:
            message = f"{path} should have been removed, and could not be: {error}"
            warnings.warn(message, ShardcoreWarning, stacklevel=2)


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to a new file that is on the disk when this returns."""
    with path.open("x", encoding="utf-8") as file:
        json.dump(value, file, indent=1 if path.name == INDEX else None)  # the others are long, and for nobody's eyes
        file.flush()
        os.fsync(file.fileno())


def sync(path: Path) -> None:
    """Bring a file, or the names in a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Network file systems that have no such call for folders.
        if not path.is_dir() or error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(handle)
