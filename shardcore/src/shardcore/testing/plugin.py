"""The pytest plugin: ``-p shardcore.testing.plugin``, or ``pytest_plugins`` in the conftest of the root folder."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from shardcore.testing.pool import WorkerPool

if TYPE_CHECKING:
    from shardcore.testing.conformance import Examination
    from shardcore.testing.findings import Finding

__all__ = ["fresh", "judge", "pool"]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``."""
    parser.addoption(
        "--quick", action="store_true", help="shardcore: conformance tests at tensor-parallel sizes 1 and 2 only"
    )


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Up to 4 gloo ranks, started by the first test that needs them and kept until the session ends."""
    with WorkerPool() as workers:
        yield workers


@pytest.fixture(scope="session")
def _examined() -> dict[Any, Any]:
    return {}


@pytest.fixture
def judge(request: pytest.FixtureRequest, pool: WorkerPool, _examined: dict[Any, Any]) -> Examination:
    """The examination of one case at one size; each of its sections runs once in a session."""
    from shardcore.testing.conformance import Examination

    subject, timeout = request.param
    key = (request.cls, subject.case.name, subject.tp)
    if key not in _examined:
        _examined[key] = Examination(pool, subject, timeout)
    examination: Examination = _examined[key]
    return examination


@pytest.fixture
def fresh(request: pytest.FixtureRequest, _examined: dict[Any, Any]) -> dict[str, Finding]:
    """What fresh processes say about the pack of a `PolicyConformance`."""
    from shardcore.testing.conformance import fresh_findings

    if request.cls not in _examined:
        findings = fresh_findings(request.cls.plugin, request.cls.all_cases())
        _examined[request.cls] = {finding.check: finding for finding in findings}
    found: dict[str, Finding] = _examined[request.cls]
    return found
