"""What the tests came to: one file for each session, the totals over all of them, and the table of the matrix."""

from __future__ import annotations

import hashlib
import json
import os
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from packaging.version import InvalidVersion, Version

# The conformance kit names the case and the size, which are too many for a table.
_CASE = re.compile(r"^closed for .+? at tp \d+:")
# As much of an error as the list of failures shows; the whole is where it was printed first, many pages above.
_SHOWN = 300
_SLOWEST = 10
_AT_IT = "the process died while it ran"

__all__ = ["Result", "Results", "digest_of", "total"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The outcome of one run of pytest.

    Attributes:
        name: the session's.
        suite: what was tested, a pack or a part of the workspace.
        against: library and release, such as ``transformers 5.0.0``; ``""`` for none.
        passed: number of tests that passed.
        failed: number of tests that failed; a run that ended without naming one counts as one.
        failures: the tests that failed -> the first line of why.
        skipped: reason -> number of tests that were skipped for it.
        seconds: how long the tests ran, without installation.
        slowest: the ten slowest tests -> their seconds.
        sources: digest of what was tested.
    """

    name: str
    suite: str
    against: str = ""
    passed: int = 0
    failed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    slowest: dict[str, float] = field(default_factory=dict)
    sources: str = ""

    @classmethod
    def of(
        cls,
        report: Path,
        *,
        success: bool,
        seconds: float,
        lines: Path | None = None,
        below: Path | None = None,
        **fields: str,
    ) -> Result:
        """Read pytest's report of a run, or of a part of it.

        Args:
            report: the report, which pytest writes at the end.
            success: what its exit status said.
            seconds: how long it ran.
            lines: what `outcomes` wrote as the tests ended; read if there is no report, since the process died.
            below: the part's folder, as the report names it; the seconds are those of its tests. If the process died,
                no part has passed.
            **fields: the others.
        """
        if report.exists():
            outcomes, times = _outcomes(report), _times(report)
        else:
            outcomes, times = _written(lines) if lines is not None and lines.exists() else {}, {}
        elsewhere = report.exists() and any(outcome == "failed" for outcome, _ in outcomes.values())
        if below is not None:
            outcomes = {test: outcome for test, outcome in outcomes.items() if _is_below(test, below)}
            times = {test: time for test, time in times.items() if _is_below(test, below)}
            seconds = sum(times.values())
        failures = {test: _first_line(reason) for test, (outcome, reason) in outcomes.items() if outcome == "failed"}
        if not (success or failures or elsewhere):
            failures = {"the run itself": "it ended with an error and names no test"}
        return cls(
            passed=sum(outcome == "passed" for outcome, _ in outcomes.values()),
            failed=len(failures),
            failures=failures,
            skipped=dict(Counter(reason for outcome, reason in outcomes.values() if outcome == "skipped")),
            seconds=round(seconds, 1),
            slowest=dict(sorted(times.items(), key=lambda item: -item[1])[:_SLOWEST]),
            **fields,
        )

    def __str__(self) -> str:
        skipped = sum(self.skipped.values())
        return f"{self.passed} passed, {self.failed} failed" + (f", {skipped} skipped" if skipped else "")


class Results:
    """The results of all sessions, as files in one folder, so that a run can be resumed.

    Args:
        folder: where they are; made when the first one is written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def all(self) -> list[Result]:
        """Return what was written, sorted by name."""
        return [Result(**json.loads(file.read_text())) for file in sorted(self.folder.glob("*.json"))]

    def passed_before(self, name: str, sources: str) -> bool:
        """Tell whether a session passed with the same sources."""
        return any(r.name == name and r.sources == sources and not r.failed for r in self.all())

    def write(self, *results: Result) -> None:
        """Keep results, in place of earlier ones of their names, and bring totals and table up to date."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for result in results:
            _replace(self.folder / f"{result.name}.json", f"{json.dumps(asdict(result), indent=2)}\n")
        self.refresh()

    def refresh(self) -> None:
        """Write totals and table anew: of sessions that end at one time, each may have missed the other's result."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / "totals", f"{self.totals()}\n")
        _replace(self.folder / "table.md", self.table())

    def slowest(self, count: int) -> str:
        """Return the slowest tests of all sessions, a line each."""
        found = sorted(((s, test, r.name) for r in self.all() for test, s in r.slowest.items()), reverse=True)
        return "\n".join([f"{s:7.1f} s  {name}  {test}" for s, test, name in found[:count]])

    def totals(self) -> Result:
        """Return the sum of all results."""
        return total(self.all())

    def table(self) -> str:
        """Return suites x releases in markdown, with the reasons of what was skipped, and what failed, below it."""
        found = self.all()
        columns = sorted({r.against for r in found}, key=_release)
        suites = sorted({r.suite for r in found})
        cells = {(r.suite, r.against): _cell(r) for r in found}
        lines = [["", *(column or "alone" for column in columns)], ["---"] * (len(columns) + 1)]
        lines += [[suite, *(cells.get((suite, column), "") for column in columns)] for suite in suites]
        table = [f"| {' | '.join(line)} |" for line in lines]
        return "\n".join([*table, "", *_reasons(found), *_failures(found)]) + "\n"


def total(results: Sequence[Result]) -> Result:
    """Return the sum of results."""
    return Result(
        name="total",
        suite="",
        passed=sum(r.passed for r in results),
        failed=sum(r.failed for r in results),
        skipped=dict(sum((Counter(r.skipped) for r in results), Counter())),
    )


def _replace(file: Path, text: str) -> None:
    """Write a file that others read meanwhile: they find the old text or the new one."""
    new = file.with_name(f".{file.name}.{os.getpid()}")
    new.write_text(text)
    new.replace(file)


def digest_of(places: Iterable[Path]) -> str:
    """Return a digest of files, and of all files below folders, that were written by hand."""
    digest = hashlib.sha256()
    for place in places:
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for file in files:
            name = file.relative_to(place.parent)
            if file.is_file() and not {"__pycache__", ".nox"}.intersection(name.parts):
                digest.update(f"{name}\0".encode())
                digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _cell(result: Result) -> str:
    minutes, seconds = divmod(round(result.seconds), 60)
    return f"{result} ({minutes}:{seconds:02})"


def _release(column: str) -> tuple[str, Version]:
    library, _, release = column.partition(" ")
    try:
        return library, Version(release)
    except InvalidVersion:
        return library, Version("0")


def _reasons(results: Sequence[Result]) -> Iterator[str]:
    for suite in sorted({r.suite for r in results}):
        total: Counter[str] = Counter()
        for result in results:
            if result.suite == suite:
                for reason, count in result.skipped.items():
                    total[_CASE.sub("closed by a case:", reason)] += count
        for reason, count in sorted(total.items()):
            yield f"- {suite}, {count} skipped: {reason}"


def _failures(results: Sequence[Result]) -> Iterator[str]:
    for result in results:
        for test, reason in result.failures.items():
            yield f"- {result.name} FAILED {test}: {reason}"


def _first_line(reason: str) -> str:
    line = next(iter(reason.strip().splitlines()), "no reason given")
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def _written(lines: Path) -> dict[str, tuple[str, str]]:
    """Return test -> what it came to until the process died, and why; the test that it was at has failed."""
    outcomes: dict[str, tuple[str, str]] = {}
    for text in lines.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue  # the last one, cut off
        test, outcome = line["test"], line["outcome"]
        if outcome == "started":
            outcomes[test] = ("failed", _AT_IT)
        elif outcome in ("passed", "failed", "skipped") and outcomes[test] in (("failed", _AT_IT), ("passed", "")):
            outcomes[test] = (outcome, line["reason"])
    return outcomes


def _is_below(test: str, folder: Path) -> bool:
    """Tell whether a test is one of a folder's; a report writes its path with dots, before or after the colons."""
    return test.removeprefix("::").replace("/", ".").startswith(f"{'.'.join(folder.parts)}.")


def _times(report: Path) -> dict[str, float]:
    cases = ElementTree.parse(report).iter("testcase")
    return {f"{case.get('classname', '')}::{case.get('name', '')}": float(case.get("time", 0)) for case in cases}


def _outcomes(report: Path) -> dict[str, tuple[str, str]]:
    """Return test -> ``passed``, ``failed`` or ``skipped``, and why, of a report; an error counts as failed.

    A test that fails and whose teardown fails too has two entries there and counts once.
    """
    outcomes: dict[str, tuple[str, str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        test = f"{case.get('classname', '')}::{case.get('name', '')}"
        kinds = {child.tag: child for child in case}
        failure = kinds.get("failure", kinds.get("error"))
        if outcomes.get(test, ("", ""))[0] == "failed":
            continue
        if failure is not None:
            outcomes[test] = ("failed", failure.get("message", ""))
        else:
            skipped = kinds.get("skipped")
            outcomes[test] = ("passed", "") if skipped is None else ("skipped", skipped.get("message", ""))
    return outcomes
