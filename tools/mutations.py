"""Puts recorded mistakes back into a copy of the workspace, one by one, and runs the test that has to notice each.

``python tools/mutations.py [--list] [--check] [--only NAME ...]``. The mistakes are in ``tests/mutations/*.toml``:

    [[mutation]]
    name = "bias-before-the-sum"          # unique
    mistake = "H4: ..."                   # in words; a hazard by its number
    test = "shardcore/tests/nn/test_parallel_modules.py::test_forward_and_gradients"

    [[mutation.edits]]                    # one or more, all made at once
    find = "..."
    replace = "..."

An edit names text, not a file: the text has to occur once in all sources (``in``, a glob below the root, narrows that),
so that moving a module changes nothing here. What becomes of a mistake:

    noticed          the test failed
    unnoticed        the test passed
    does not apply   the text is not there, or more than once
    no test          the test is not there, or is red without the mistake
    no end           the test took longer than its limit

Anything but ``noticed`` fails the run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Edit", "Mutation", "Outcome", "load", "main", "try_all"]

ROOT = Path(__file__).parents[1]
SOURCES = ("shardcore/src/**/*.py", "packs/*/src/**/*.py")
LIMIT = 300.0  # seconds for one test
_LEFT_OUT = shutil.ignore_patterns(".git", ".nox", ".venv", "site", "__pycache__", "*.egg-info", ".*_cache")
# Exit statuses of pytest.
_PASSED, _FAILED = 0, 1


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
        files = sorted({file for glob in self.within for file in root.glob(glob)})
        found = [(file, file.read_text(encoding="utf-8").count(self.find)) for file in files]
        found = [(file, count) for file, count in found if count]
        if sum(count for _, count in found) != 1:
            where = ", ".join(f"{file.relative_to(root)} ({count})" for file, count in found) or "nowhere"
            raise DoesNotApplyError(f"found {where}: {self.find.strip().splitlines()[0]!r}")
        return found[0][0]


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
        before: dict[Path, str] = {}
        try:
            for edit in self.edits:
                file = edit.place(root)
                text = file.read_text(encoding="utf-8")
                before.setdefault(file, text)
                file.write_text(text.replace(edit.find, edit.replace), encoding="utf-8")
            yield
        finally:
            for file, text in before.items():
                file.write_text(text, encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """What became of a mistake."""

    mutation: Mutation
    result: str
    seconds: float = 0.0
    detail: str = ""

    def __str__(self) -> str:
        text = f"{self.result:<15} {self.mutation.name} ({self.seconds:.0f} s)  {self.mutation.test}"
        return f"{text}\n    {self.detail}" if self.detail else text


def load(folder: Path) -> list[Mutation]:
    """Return the recorded mistakes, sorted by file.

    Raises:
        ValueError: a name is used twice, or a record has other keys.
    """
    found = [
        _mutation(record)
        for file in sorted(folder.glob("*.toml"))
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


def try_all(mutations: Sequence[Mutation], root: Path, *, limit: float = LIMIT) -> Iterator[Outcome]:
    """Yield what becomes of each mistake in a copy of a workspace.

    Args:
        mutations: the mistakes.
        root: the workspace, which is not changed.
        limit: seconds for one test.
    """
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "workspace"
        shutil.copytree(root, copy, ignore=_LEFT_OUT)
        green: dict[str, int | None] = {}
        for mutation in mutations:
            yield _try(mutation, copy, limit, green)


def _try(mutation: Mutation, root: Path, limit: float, green: dict[str, int | None]) -> Outcome:
    start = time.monotonic()

    def outcome(result: str, detail: str = "") -> Outcome:
        return Outcome(mutation, result, time.monotonic() - start, detail)

    try:
        with mutation.applied(root):
            pass
    except DoesNotApplyError as error:
        return outcome("does not apply", str(error))
    if mutation.test not in green:
        green[mutation.test] = _run(mutation.test, root, limit)[0]
    if green[mutation.test] != _PASSED:
        return outcome("no test", f"without the mistake pytest ends with {green[mutation.test]}")
    with mutation.applied(root):
        status, output = _run(mutation.test, root, limit)
    if status is None:
        return outcome("no end", f"not after {limit:.0f} s")
    if status == _PASSED:
        return outcome("unnoticed", mutation.mistake)
    if status == _FAILED:
        return outcome("noticed")
    return outcome("no test", f"with the mistake pytest ends with {status}: {output.strip()[-300:]}")


def _run(test: str, root: Path, limit: float) -> tuple[int | None, str]:
    """Return the exit status of pytest, None if it did not end, and what it said."""
    sources = [root / "shardcore" / "src", *sorted(root.glob("packs/*/src"))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources)), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=root, env=env, text=True, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            return None, ""
    return process.returncode, output


def _chosen(mutations: Iterable[Mutation], names: Sequence[str] | None) -> list[Mutation]:
    chosen = [mutation for mutation in mutations if not names or mutation.name in names]
    if unknown := set(names or ()) - {mutation.name for mutation in chosen}:
        raise SystemExit(f"no mutation is named {', '.join(sorted(unknown))}; see --list")
    return chosen


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description="put recorded mistakes back, and see whether tests notice")
    parser.add_argument("--list", action="store_true", help="print the names, the mistakes and the tests")
    parser.add_argument("--check", action="store_true", help="see whether each edit applies; run no test")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one test (default %(default)s)")
    options = parser.parse_args(arguments)
    mutations = _chosen(load(root / "tests" / "mutations"), options.only)
    if options.list:
        for mutation in mutations:
            print(f"{mutation.name}\n    {mutation.mistake}\n    {mutation.test}")
        return 0
    outcomes = []
    for outcome in _checked(mutations, root) if options.check else try_all(mutations, root, limit=options.limit):
        print(outcome, flush=True)
        outcomes.append(outcome)
    bad = [outcome for outcome in outcomes if outcome.result not in ("noticed", "applies")]
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} {'apply' if options.check else 'noticed'}")
    return 1 if bad else 0


def _checked(mutations: Iterable[Mutation], root: Path) -> Iterator[Outcome]:
    for mutation in mutations:
        try:
            for edit in mutation.edits:
                edit.place(root)
            yield Outcome(mutation, "applies")
        except DoesNotApplyError as error:
            yield Outcome(mutation, "does not apply", detail=str(error))


if __name__ == "__main__":
    sys.exit(main())
