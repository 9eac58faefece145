"""The pytest plugin: ``-p shardcore.testing.plugin``, or ``pytest_plugins`` in the conftest of the root folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from shardcore.testing.pool import WorkerPool

if TYPE_CHECKING:
    from shardcore.testing.conformance import Examination
    from shardcore.testing.findings import Finding

__all__ = ["QuickPool", "fresh", "judge", "pool"]

_WHOLE = "whole: takes long; ``--quick`` leaves it to the whole kit"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick`` and ``--families``."""
    parser.addoption(
        "--families",
        action="store_true",
        help="shardcore: what is the same for all models of a family runs for the first case of each",
    )
    parser.addoption(
        "--quick",
        action="store_true",
        help="shardcore: what is the same for all models of a family runs for the first case of all, on one and two "
        "ranks only, and without tests that are marked as `whole`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker ``whole`` known."""
    config.addinivalue_line("markers", _WHOLE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the kit's tests of one number of ranks after each other; with ``--quick`` leave out what is marked ``whole``.

    Ranks join another process group for each other number, and what DTensor remembers of its operations ends with it.
    """
    places = [index for index, item in enumerate(items) if _ranks(item)]
    for index, item in zip(places, sorted((items[at] for at in places), key=_ranks), strict=True):
        items[index] = item
    if not config.getoption("quick"):
        return
    left_out = [item for item in items if item.get_closest_marker("whole")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("whole")]


def _ranks(item: pytest.Item) -> int:
    """Return the number of ranks that a test of the kit runs on; 0 for every other test."""
    judged = getattr(getattr(item, "callspec", None), "params", {}).get("judge")
    return 0 if judged is None else int(judged[-1])


class QuickPool(WorkerPool):
    """A pool of two ranks; a test that asks it for more is skipped, and says so."""

    def __init__(self) -> None:
        super().__init__(2)

    def run(self, function: Callable[..., Any], *args: Any, world: int = 2, **kwargs: Any) -> list[Any]:
        """Call a function on the ranks, as `WorkerPool.run` does."""
        if world > self.size:
            pytest.skip(f"--quick leaves {world} ranks to the whole kit")
        return super().run(function, *args, world=world, **kwargs)


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    """Up to 4 gloo ranks, with ``--quick`` 2, started by the first test that needs them and kept for the session."""
    with QuickPool() if request.config.getoption("quick") else WorkerPool() as workers:
        yield workers


@pytest.fixture(scope="session")
def _examined() -> dict[Any, Any]:
    return {}


@pytest.fixture
def judge(request: pytest.FixtureRequest, pool: WorkerPool, _examined: dict[Any, Any]) -> Examination:
    """The examination of one case at one size; each of its sections runs once in a session."""
    from shardcore.testing.conformance import Examination

    subject, timeout, _ = request.param
    key = (request.cls, subject.case.name, subject.tp)
    if key not in _examined:
        _examined[key] = Examination(pool, subject, timeout)
    examination: Examination = _examined[key]
    return examination


@pytest.fixture
def fresh(request: pytest.FixtureRequest, pool: WorkerPool, _examined: dict[Any, Any]) -> dict[str, Finding]:
    """What a fresh process, and processes of different hash seeds, say about the pack of a `PolicyConformance`."""
    from shardcore.testing.conformance import fresh_findings

    if request.cls not in _examined:
        findings = fresh_findings(pool, request.cls.plugin, request.cls.all_cases())
        _examined[request.cls] = {finding.check: finding for finding in findings}
    found: dict[str, Finding] = _examined[request.cls]
    return found
