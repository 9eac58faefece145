"""Puts recorded mistakes back into a copy of the workspace, one by one, and runs the test that has to notice each.

``python tools/mutations.py [--list] [--check] [--only NAME ...] [--kind KIND] [--sample] [--jobs N]``. The mistakes are
in ``tests/mutations/*.toml``, a file for each kind, where ``NAME`` may be a pattern such as ``'h6-*'``:

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
    no test          the test is not there, is skipped, or is red without the mistake
    no end           the test took longer than its limit

Anything but ``noticed`` fails the run. First the tests run without any mistake, those of one file together; then each
mistake has a run of its own. ``--jobs`` runs go on at a time, in as many copies of the workspace. ``--sample`` tries
those that ``tests/mutations/sample.txt`` names, with the options of the quick run, which has seen their tests pass.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import itertools
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["Edit", "Mutation", "Outcome", "load", "main", "try_all"]

Work = TypeVar("Work")
Result = TypeVar("Result")

ROOT = Path(__file__).parents[1]
SOURCES = ("shardcore/src/**/*.py", "packs/*/src/**/*.py")
SAMPLE = "sample.txt"
LIMIT = 300.0  # seconds for one test
_LEFT_OUT = shutil.ignore_patterns(".git", ".nox", ".venv", "site", "__pycache__", "*.egg-info", ".*_cache")
# Exit statuses of pytest.
_PASSED, _FAILED = 0, 1
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
        files = sorted({file for glob in self.within for file in root.glob(glob)})
        found = [(file, _text(file, file.stat().st_mtime_ns).count(self.find)) for file in files]
        found = [(file, count) for file, count in found if count]
        if sum(count for _, count in found) != 1:
            where = ", ".join(f"{file.relative_to(root)} ({count})" for file, count in found) or "nowhere"
            raise DoesNotApplyError(f"found {where}: {self.find.strip().splitlines()[0]!r}")
        return found[0][0]


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


def try_all(
    mutations: Sequence[Mutation],
    root: Path,
    *,
    limit: float = LIMIT,
    jobs: int = 1,
    quick: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> Iterator[Outcome]:
    """Yield what becomes of each mistake in copies of a workspace, as it is known.

    Args:
        mutations: the mistakes.
        root: the workspace, which is not changed.
        limit: seconds for one test.
        jobs: how many runs go on at a time.
        quick: run the tests as the quick run does, and only with the mistakes.
        tell: called with a line for each run without a mistake.
    """
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies = [Path(folder) / str(number) for number in range(min(jobs, len(mutations)))]
        for copy in copies:
            shutil.copytree(root, copy, ignore=_LEFT_OUT)
        found: list[Mutation] = []
        for mutation in mutations:
            try:
                for edit in mutation.edits:
                    edit.place(root)
                found.append(mutation)
            except DoesNotApplyError as error:
                yield Outcome(mutation, "does not apply", detail=str(error))
        runs = _Runs(copies, limit, ["--quick"] if quick else [])
        green: dict[str, str] = dict.fromkeys((mutation.test for mutation in found), "") if quick else {}
        for of_file in [] if quick else runs.each(_by_file(found), runs.without_mistake):
            green |= of_file
            tell(_told(of_file))
        for mutation in found:
            if said := green[mutation.test]:
                yield Outcome(mutation, "no test", detail=said)
        yield from runs.each([mutation for mutation in found if not green[mutation.test]], runs.with_mistake)


def _by_file(mutations: Iterable[Mutation]) -> list[list[str]]:
    """Return the tests of the mutations, each once, by their file."""
    tests = sorted({mutation.test for mutation in mutations})
    return [list(some) for _, some in itertools.groupby(tests, lambda test: test.partition("::")[0])]


def _told(green: dict[str, str]) -> str:
    file = next(iter(green)).partition("::")[0]
    return f"without mistake  {sum(not said for said in green.values())} of {len(green)} tests pass  {file}"


class _Runs:
    """Runs of pytest in copies of a workspace.

    Args:
        copies: the copies; in each of them one test runs at a time.
        limit: seconds for one test.
        options: further options of pytest.
    """

    def __init__(self, copies: Sequence[Path], limit: float, options: Sequence[str] = ()) -> None:
        self._options = options
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for copy in copies:
            self._free.put(copy)
        self._jobs, self._limit = len(copies), limit
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False

    def each(self, items: Sequence[Work], work: Callable[[Work, Path], Result]) -> Iterator[Result]:
        """Yield what ``work`` returns for each item and a copy that is free, as it is known."""

        def in_copy(item: Work) -> Result:
            copy = self._free.get()
            try:
                return work(item, copy)
            finally:
                self._free.put(copy)

        with ThreadPoolExecutor(max(self._jobs, 1)) as pool:
            try:
                for done in as_completed([pool.submit(in_copy, item) for item in items]):
                    yield done.result()
            except BaseException:  # whoever asked goes away: so do the runs
                self._stopped = True
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _kill(process)
                raise

    def without_mistake(self, tests: Sequence[str], copy: Path) -> dict[str, str]:
        """Return what is wrong with each of the tests of one file; nothing if it passes."""
        status, output = self._run(tests, copy)
        if status == _PASSED and not _skipped(output):
            return dict.fromkeys(tests, "")
        if len(tests) > 1:  # each by itself
            return {test: said for each in tests for test, said in self.without_mistake([each], copy).items()}
        if status == _PASSED and re.search(r"\d passed", output.rstrip().rpartition("\n")[2]):
            return {tests[0]: ""}  # some of its cases
        said = "it is skipped" if status == _PASSED else f"without the mistake pytest ends with {status}"
        return {tests[0]: f"{said}: {_end(output)}"}

    def with_mistake(self, mutation: Mutation, copy: Path) -> Outcome:
        """Make the mistake, and see whether its test notices."""
        start = time.monotonic()
        try:
            with mutation.applied(copy):
                status, output = self._run([mutation.test], copy)
        except DoesNotApplyError as error:  # an edit took the text of the next one
            return Outcome(mutation, "does not apply", time.monotonic() - start, str(error))
        if status is None:
            result, detail = "no end", f"not after {self._limit:.0f} s"
        elif status == _PASSED:
            result, detail = "unnoticed", mutation.mistake
        elif status == _FAILED:
            result, detail = "noticed", ""
        else:
            result, detail = "no test", f"with the mistake pytest ends with {status}: {_end(output)}"
        return Outcome(mutation, result, time.monotonic() - start, detail)

    def _run(self, tests: Sequence[str], root: Path) -> tuple[int | None, str]:
        """Return the exit status of pytest, None if it did not end, and what it said."""
        sources = [root / "shardcore" / "src", *sorted(root.glob("packs/*/src"))]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sources))}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *self._options, *tests]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL}
        with subprocess.Popen(command, cwd=root, env=env, text=True, start_new_session=True, **pipes) as process:
            self._running.add(process)
            if self._stopped:
                _kill(process)
            try:
                output, _ = process.communicate(timeout=self._limit * len(tests))
            except subprocess.TimeoutExpired:
                _kill(process)
                return None, ""
            finally:
                self._running.discard(process)
        return process.returncode, output


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its ranks too


def _skipped(output: str) -> bool:
    return " skipped" in output.rstrip().rpartition("\n")[2]


def _end(output: str) -> str:
    return output.strip()[-300:]


def _asked_for(root: Path, options: argparse.Namespace) -> list[Mutation]:
    folder = root / "tests" / "mutations"
    names = options.only
    if options.sample:
        names = [*(names or ()), *(folder / SAMPLE).read_text(encoding="utf-8").split()]
    return _chosen(load(folder, options.kind), names)


def _chosen(mutations: Iterable[Mutation], names: Sequence[str] | None) -> list[Mutation]:
    mutations = list(mutations)
    known = [mutation.name for mutation in mutations]
    if unknown := [name for name in names or () if not fnmatch.filter(known, name)]:
        raise SystemExit(f"no mutation is named {', '.join(sorted(unknown))}; see --list")
    return [m for m in mutations if names is None or any(fnmatch.fnmatchcase(m.name, name) for name in names)]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description="put recorded mistakes back, and see whether tests notice")
    parser.add_argument("--list", action="store_true", help="print the names, the mistakes and the tests")
    parser.add_argument("--check", action="store_true", help="see whether each edit applies; run no test")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these alone")
    parser.add_argument("--kind", default="*", help="those of one file")
    parser.add_argument("--sample", action="store_true", help="those of the quick run")
    parser.add_argument("--jobs", type=int, default=_cores(), help="runs at a time (default %(default)s)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one test (default %(default)s)")
    options = parser.parse_args(arguments)
    mutations = _asked_for(root, options)
    if options.list:
        for mutation in mutations:
            print(f"{mutation.name}\n    {mutation.mistake}\n    {mutation.test}")
        return 0
    outcomes: list[Outcome] = []
    start = time.monotonic()
    with _ended_by_a_signal():
        for outcome in _checked(mutations, root) if options.check else _tried(mutations, root, options):
            outcomes.append(outcome)
            print(f"[{len(outcomes)}/{len(mutations)}] {outcome}", flush=True)
    bad = [outcome for outcome in outcomes if outcome.result not in ("noticed", "applies")]
    for outcome in bad:
        print(f"{outcome.result}: {outcome.mutation.name}")
    spent = "" if options.check else f" in {(time.monotonic() - start) / 60:.1f} min"
    print(f"{len(outcomes) - len(bad)} of {len(outcomes)} {'apply' if options.check else 'noticed'}{spent}")
    return 1 if bad else 0


def _tried(mutations: Sequence[Mutation], root: Path, options: argparse.Namespace) -> Iterator[Outcome]:
    tell = functools.partial(print, flush=True)
    return try_all(mutations, root, limit=options.limit, jobs=options.jobs, quick=options.sample, tell=tell)


@contextmanager
def _ended_by_a_signal() -> Iterator[None]:
    """Let a termination end the runs and remove the copies, as Ctrl-C does."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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
