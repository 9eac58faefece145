"""The recorded mistakes of ``tests/mutations/*.toml``, and what makes one in a copy of the workspace.

A file for each kind holds:

    [[mutation]]
    name = "bias-before-the-sum"          # unique
    mistake = "H4: ..."                   # in words; a hazard by its number
    test = "shardcore/tests/nn/test_parallel_modules.py::test_forward_and_gradients"

    [[mutation.edits]]                    # one or more, all made at once
    find = "..."
    replace = "..."

An edit names text, not a file: the text has to occur once in all sources (``in``, a glob below the root, narrows that),
so that moving a module changes nothing here.
"""

from __future__ import annotations

import functools
import itertools
import os
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["DoesNotApplyError", "Edit", "Mutation", "load"]

SOURCES = ("shardcore/src/**/*.py", "kit/*/src/**/*.py", "clients/*/src/**/*.py", "packs/*/src/**/*.py")
# When a file with a mistake was written, in seconds of 1970: no two are alike, so that bytecode is never taken for that
# of another text. Without bytecode every process would compile all sources.
_TIMES = itertools.count(1)


class DoesNotApplyError(Exception):
    """The text of an edit is not there, or more than once."""


@dataclass(frozen=True)
class Edit:
    """A text and what replaces it.

    Attributes:
        find: the text; it occurs once.
        replace: the mistake.
        within: globs below the root of where to look.
    """

    find: str
    replace: str
    within: tuple[str, ...] = SOURCES

    def place(self, root: Path) -> Path:
        """Return the file that holds the text.

        Raises:
            DoesNotApplyError: no file does, or the text is there more than once.
        """
        found = [(file, _text(file, file.stat().st_mtime_ns).count(self.find)) for file in _files(root, self.within)]
        found = [(file, count) for file, count in found if count]
        if sum(count for _, count in found) != 1:
            where = ", ".join(f"{file.relative_to(root)} ({count})" for file, count in found) or "nowhere"
            raise DoesNotApplyError(f"found {where}: {self.find.strip().splitlines()[0]!r}")
        return found[0][0]


@functools.cache
def _files(root: Path, within: tuple[str, ...]) -> list[Path]:
    return sorted({file for glob in within for file in root.glob(glob)})


@functools.cache
def _text(file: Path, changed: int) -> str:
    """Return what is in a file that was changed then: hundreds of edits look through all of them."""
    return file.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Mutation:
    """One recorded mistake."""

    name: str
    mistake: str
    test: str
    edits: tuple[Edit, ...]

    @contextmanager
    def applied(self, root: Path) -> Iterator[None]:
        """Make the mistake in a copy of the workspace, and take it back."""
        before: dict[Path, tuple[str, int]] = {}
        try:
            for edit in self.edits:
                file = edit.place(root)
                text = file.read_text(encoding="utf-8")
                before.setdefault(file, (text, file.stat().st_mtime_ns))
                _write(file, text.replace(edit.find, edit.replace), next(_TIMES) * 10**9)
            yield
        finally:
            for file, (text, time_ns) in before.items():
                _write(file, text, time_ns)


def _write(file: Path, text: str, time_ns: int) -> None:
    file.write_text(text, encoding="utf-8")
    os.utime(file, ns=(time_ns, time_ns))


def load(folder: Path, kind: str = "*") -> list[Mutation]:
    """Return the recorded mistakes, sorted by file; of one kind, which has a file, if it is named.

    Raises:
        ValueError: a name is used twice, or a record has other keys.
    """
    found = [
        _mutation(record)
        for file in sorted(folder.glob(f"{kind}.toml"))
        for record in tomllib.loads(file.read_text(encoding="utf-8"))["mutation"]
    ]
    names = [mutation.name for mutation in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"names that are used twice: {', '.join(sorted(twice))}")
    return found


def _mutation(record: dict[str, Any]) -> Mutation:
    wanted = {"name", "mistake", "test", "edits"}
    if record.keys() != wanted or not record["edits"]:
        raise ValueError(f"{record.get('name', record)}: wanted the keys {sorted(wanted)}, got {sorted(record)}")
    edits = []
    for edit in record["edits"]:
        if not {"find", "replace"} <= edit.keys() <= {"find", "replace", "in"} or edit["find"] == edit["replace"]:
            raise ValueError(f"{record['name']}: an edit has find, replace and perhaps in, and changes something")
        within = (edit["in"],) if "in" in edit else SOURCES
        edits.append(Edit(edit["find"], edit["replace"], within))
    return Mutation(record["name"], record["mistake"], record["test"], tuple(edits))
