"""Putting a checkpoint where an earlier one is, so that a reader finds the old weights or the new, never a mixture.

A save writes everything into a folder of its own beside the old files, `STAGING`. `Staging.place` then renames: what
the old checkpoint does not use goes first, then one rename or removal, the *pivot*, makes the new weights the ones that
are read, and only then what is stale goes. A process killed anywhere leaves a folder that loads.

What is read is decided by transformers, in the same order by every release: ``model.safetensors`` if it is there, else
the files that ``model.safetensors.index.json`` names, whatever their names are. So the pivot is

* to one file: the rename of ``model.safetensors``, which wins over an index;
* from one file to several: the removal of ``model.safetensors``, after the new index is there;
* from several to several: the rename of the index. Where the new files would take names that the old index uses, they
  get others first, and their own names afterwards, as further links to the same data, by a second rename of the index.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardcore.checkpoint.folders import sync

#: The folder, inside that of the checkpoint, in which a save writes; what a killed save left there, the next removes.
STAGING = ".shardcore-save"

_SUFFIX = ".safetensors"


@dataclass(slots=True)
class Staging:
    """One save into ``folder``.

    Attributes:
        folder: where the checkpoint will be.
        weights: the name of the file that holds all weights, if there is one.
        index: the name of the index, if the weights are in several files.
    """

    folder: Path
    weights: str
    index: str

    @classmethod
    def begin(cls, folder: Path, weights: str, index: str) -> Staging:
        """Make room for a save, and remove what a killed one left.

        Raises:
            OSError: the folder cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        staging = cls(folder, weights, index)
        staging.discard()
        staging.rest.mkdir(parents=True)
        return staging

    @property
    def path(self) -> Path:
        """Where to write the weights, under the names they will have."""
        return self.folder / STAGING

    @property
    def rest(self) -> Path:
        """Where to let transformers write, which removes numbered weights wherever it does."""
        return self.path / "rest"

    def discard(self) -> None:
        """Remove what was written and not placed."""
        if self.path.exists():
            shutil.rmtree(self.path)

    def place(self) -> None:
        """Move everything that was written into the folder; the second call does nothing.

        Raises:
            OSError: a file could not be moved; what is read is the old checkpoint or the new one.
        """
        if not self.path.exists():
            return
        if self.rest.exists():
            _move(self.rest, self.path)
            shutil.rmtree(self.rest)
        files = _files_in(self.path)
        self._take_modes(files)
        for file in sorted(files):
            sync(self.path / file)
        if Path(self.weights) in files:
            _move(self.path, self.folder, files - {Path(self.weights)})
            self._place_one()
        elif Path(self.index) in files:
            index = json.loads((self.path / self.index).read_text(encoding="utf-8"))
            names = sorted(set(index["weight_map"].values()))
            _move(self.path, self.folder, files - {Path(self.index), *map(Path, names)})
            self._place_several(index, names)
        else:  # no weights of the model itself: an adapter
            _move(self.path, self.folder, files)
        self.discard()
        sync(self.folder)

    def _take_modes(self, files: Iterable[Path]) -> None:
        """Let others read the weights as far as any new file: safetensors makes files for their owner alone."""
        probe = self.path / "mode"
        probe.touch()  # the umask cannot be read without changing it for all threads
        mode = stat.S_IMODE(probe.stat().st_mode)
        probe.unlink()
        for file in files:
            path = self.path / file
            if file.suffix == _SUFFIX and stat.S_IMODE(path.stat().st_mode) != mode:
                path.chmod(mode)

    def _place_one(self) -> None:
        sync(self.folder)
        (self.path / self.weights).replace(self.folder / self.weights)
        sync(self.folder)
        (self.folder / self.index).unlink(missing_ok=True)
        self._remove_numbered(())

    def _place_several(self, index: Mapping[str, Any], names: list[str]) -> None:
        read = set() if (self.folder / self.weights).exists() else _named_by(self.folder / self.index)
        places = {name: name for name in names} if read.isdisjoint(names) else self._free_names(names, read)
        for name, place in places.items():
            (self.path / name).replace(self.folder / place)
        self._write_index(index, places)
        (self.folder / self.weights).unlink(missing_ok=True)
        sync(self.folder)
        if self._link(places):
            self._write_index(index, {name: name for name in names})
            places = {name: name for name in names}
        self._remove_numbered(places.values())

    def _free_names(self, names: Iterable[str], read: set[str]) -> dict[str, str]:
        """Return names that ``read`` lacks, of the form that transformers too removes when it saves here."""
        stem, tag = self.weights.removesuffix(_SUFFIX), 1
        while True:
            free = {name: f"{stem}-{tag}{name.removeprefix(stem)}" for name in names}
            if read.isdisjoint(free.values()):
                return free
            tag += 1

    def _link(self, places: Mapping[str, str]) -> bool:
        """Give the files under free names their own names too; tell whether there are such files and all have both."""
        moved = {name: place for name, place in places.items() if name != place}
        try:
            for name, place in moved.items():
                os.link(self.folder / place, self.path / name)
                (self.path / name).replace(self.folder / name)
        except OSError:  # a file system without links: the index keeps naming the files as they are
            return False
        return bool(moved)

    def _write_index(self, index: Mapping[str, Any], places: Mapping[str, str]) -> None:
        where = {key: places[name] for key, name in index["weight_map"].items()}
        text = json.dumps({**index, "weight_map": where}, indent=2, sort_keys=True) + "\n"
        new = self.path / self.index
        new.write_text(text, encoding="utf-8")
        sync(new)
        sync(self.folder)
        new.replace(self.folder / self.index)
        sync(self.folder)

    def _remove_numbered(self, kept: Iterable[str]) -> None:
        stem = re.escape(self.weights.removesuffix(_SUFFIX))
        numbered = re.compile(rf"{stem}(-\d+)?-\d{{5}}-of-\d{{5}}{re.escape(_SUFFIX)}")
        kept = set(kept)
        for file in list(self.folder.iterdir()):
            if numbered.fullmatch(file.name) and file.name not in kept:
                file.unlink(missing_ok=True)


def _files_in(folder: Path) -> set[Path]:
    return {file.relative_to(folder) for file in folder.rglob("*") if file.is_file()}


def _move(source: Path, target: Path, files: Iterable[Path] | None = None) -> None:
    for file in sorted(_files_in(source) if files is None else files):
        (target / file).parent.mkdir(parents=True, exist_ok=True)
        (source / file).replace(target / file)


def _named_by(index: Path) -> set[str]:
    """Return the files that an index names; none if there is no index, or one that nobody can read."""
    try:
        return {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
