"""A pytest plugin that writes down each test as it ends, so that a run that dies has told what had passed.

``pytest -p outcomes --outcomes FILE``: one JSON line when a test starts, and one for each of its phases.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--outcomes``."""
    parser.addoption("--outcomes", type=Path, help="write each test's outcome into this file as it ends")


def pytest_configure(config: pytest.Config) -> None:
    """Write if there is a file to write to."""
    if (file := config.getoption("outcomes")) is not None:
        config.pluginmanager.register(Outcomes(file), "outcomes of tests")


class Outcomes:
    """Writes the lines, each at once.

    Args:
        file: where; emptied first.
    """

    def __init__(self, file: Path) -> None:
        self._file = file.open("w", buffering=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test starts."""
        self._write(test=nodeid, outcome="started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Write the outcome of a phase."""
        if report.skipped and isinstance(report.longrepr, tuple):
            reason = report.longrepr[2]
        else:
            reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", "")
        outcome = report.outcome if report.when == "call" or report.outcome != "passed" else report.when
        self._write(test=report.nodeid, outcome=outcome, reason=reason.removeprefix("Skipped: "))

    def _write(self, **line: object) -> None:
        self._file.write(f"{json.dumps(line)}\n")
