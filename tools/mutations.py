"""Puts recorded mistakes back into a copy of the workspace, one by one, and runs the test that has to notice each.

``python tools/mutations.py [--list] [--check] [--only NAME ...] [--kind KIND] [--jobs N]``. The mistakes are
in ``tests/mutations/*.toml``, a file for each kind (see `mistakes.py`), where ``NAME`` may be a pattern such as
``'h6-*'``. What becomes of one:

    noticed          the test failed
    unnoticed        the test passed
    does not apply   the text is not there, or more than once
    no test          the test is not there, is skipped, or is red without the mistake
    no end           the test took longer than its limit

Anything but ``noticed`` fails the run. First the tests run without any mistake, those of one file together; then each
mistake has a run of its own. ``--jobs`` runs go on at a time, in as many copies of the workspace. What torch and
transformers take to be imported is spent once, by the processes that all runs are forked from: see `warm.py`.
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
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from mistakes import DoesNotApplyError, Mutation, load  # from tools/
from warm import Forked, run_pytest, servers  # from tools/

__all__ = ["Outcome", "main", "try_all"]

Work = TypeVar("Work")
Result = TypeVar("Result")

ROOT = Path(__file__).parents[1]
POOL = Path("kit/shardcore-testing/src/shardcore_testing")
# What most tests import, and has no mistakes.
WARM = (
    "pytest",
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "transformers.modeling_utils",
    "transformers.generation",
)
LIMIT = 300.0  # seconds for one test
_LEFT_OUT = shutil.ignore_patterns(".git", ".nox", ".venv", "site", "__pycache__", "*.egg-info", ".*_cache")
# Exit statuses of pytest.
_PASSED, _FAILED = 0, 1


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


def try_all(
    mutations: Sequence[Mutation],
    root: Path,
    *,
    limit: float = LIMIT,
    jobs: int = 1,
    modules: Sequence[str] = (),
    tell: Callable[[str], object] = lambda line: None,
) -> Iterator[Outcome]:
    """Yield what becomes of each mistake in copies of a workspace, as it is known.

    Args:
        mutations: the mistakes.
        root: the workspace, which is not changed.
        limit: seconds for one test.
        jobs: how many runs go on at a time.
        modules: what the processes that run tests have imported before they start.
        tell: called with a line for each run without a mistake.
    """
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder, servers(modules, ranks=4, env=_env()) as warm:
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
        runs = _Runs(copies, warm, limit)
        green: dict[str, str] = {}
        for of_file in runs.each(_by_file(found), runs.without_mistake):
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
        warm: the folder of the servers that fork processes for them.
        limit: seconds for one test.
    """

    def __init__(self, copies: Sequence[Path], warm: Path, limit: float) -> None:
        self._warm = warm
        self._free: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for copy in copies:
            self._free.put(copy)
        self._jobs, self._limit = len(copies), limit
        self._running: set[Forked] = set()
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
                    process.kill()
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
        # A pool with a mistake starts its ranks by itself.
        try:
            forked = not any(copy / POOL in edit.place(copy).parents for edit in mutation.edits)
            with mutation.applied(copy):
                status, output = self._run([mutation.test], copy, forked=forked)
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

    def _run(self, tests: Sequence[str], root: Path, *, forked: bool = True) -> tuple[int | None, str]:
        """Return the exit status of pytest, None if it did not end, and what it said.

        Args:
            tests: the tests.
            root: the copy.
            forked: its ranks are forked too.
        """
        rooms = ("shardcore", "clients/*", "kit/*", "packs/*")
        sources = [source for room in rooms for source in sorted(root.glob(f"{room}/src"))]
        command = ["-q", "-x", "-p", "no:cacheprovider", *tests]
        env = {**_env(), "PYTHONPATH": os.pathsep.join(map(str, sources))}
        with tempfile.TemporaryFile("w+") as file:
            to = file.fileno()
            process = Forked(
                self._warm / "main",
                run_pytest,
                command,
                str(self._warm) if forked else "",
                output=(to, to),
                path=["", *map(str, sources)],
                env=env,
                cwd=root,
            )
            self._running.add(process)
            if self._stopped:
                process.kill()
            process.join(self._limit * len(tests))
            self._running.discard(process)
            if process.exitcode is None:
                process.kill()
                return None, ""
            file.seek(0)
            return process.exitcode, file.read()


def _env() -> dict[str, str]:
    """Return the environment of the tests: their modules are compiled once."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def _skipped(output: str) -> bool:
    return " skipped" in output.rstrip().rpartition("\n")[2]


def _end(output: str) -> str:
    return output.strip()[-300:]


def _asked_for(root: Path, options: argparse.Namespace) -> list[Mutation]:
    return _chosen(load(root / "tests" / "mutations", options.kind), options.only)


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
    return try_all(mutations, root, limit=options.limit, jobs=options.jobs, modules=WARM, tell=tell)


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
