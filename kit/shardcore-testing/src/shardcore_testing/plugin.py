"""The pytest plugin: ``-p shardcore_testing.plugin``, or ``pytest_plugins`` in the conftest of the root folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from shardcore_testing.pool import WorkerPool

if TYPE_CHECKING:
    from shardcore_testing.conformance import Examination
    from shardcore_testing.findings import Finding


_MARKERS = (
    "nightly: takes long, or repeats for one model what is shown for another; ``--quick`` leaves it out",
    "four: needs more than two ranks, and ``--quick`` runs it all the same",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--quick``, ``--device`` and ``--ranks``."""
    parser.addoption("--device", default="cpu", help="shardcore: what ranks compute on: cpu, or cuda (default: cpu)")
    parser.addoption("--ranks", type=int, default=4, help="shardcore: tests that need more ranks are skipped")
    parser.addoption(
        "--quick",
        action="store_true",
        help="shardcore: two ranks; the numbers of each family and kind of head, and the rest where it is new; without "
        "tests that are marked as `nightly`",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the markers known."""
    for marker in _MARKERS:
        config.addinivalue_line("markers", marker)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the kit's tests of one number of ranks after each other; with ``--quick`` leave out what is nightly.

    Ranks join another process group for each other number, and what DTensor remembers of its operations ends with it.
    """
    if config.getoption("quick"):
        left_out = [item for item in items if _is_nightly(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _is_nightly(item)]
    places = [index for index, item in enumerate(items) if _ranks(item)]
    for index, item in zip(places, sorted((items[at] for at in places), key=_ranks), strict=True):
        items[index] = item


def _is_nightly(item: pytest.Item) -> bool:
    """Tell whether a test is marked so, or is a check of the kit that runs for no case."""
    return item.get_closest_marker("nightly") is not None or not isinstance(_judged(item), tuple | None)


def _ranks(item: pytest.Item) -> int:
    """Return the number of ranks that a test of the kit runs on; 0 for every other test."""
    judged = _judged(item)
    return int(judged[-1]) if isinstance(judged, tuple) else 0


def _judged(item: pytest.Item) -> Any:
    return getattr(getattr(item, "callspec", None), "params", {}).get("judge")


class LimitedPool(WorkerPool):
    """A pool whose calls on more ranks than wanted are skipped.

    Attributes:
        most: the largest number of ranks that the test which runs may have.
    """

    most = 4

    def run(self, function: Callable[..., Any], *args: Any, world: int = 2, **kwargs: Any) -> list[Any]:
        """Call a function on the ranks, as `WorkerPool.run` does."""
        if self.most < world <= self.size:
            pytest.skip(f"{world} ranks are left to the nightly run")
        return super().run(function, *args, world=world, **kwargs)


@pytest.fixture(scope="session")
def _pool(request: pytest.FixtureRequest) -> Iterator[LimitedPool]:
    with LimitedPool(device=request.config.getoption("device")) as workers:
        yield workers


@pytest.fixture
def pool(request: pytest.FixtureRequest, _pool: LimitedPool) -> WorkerPool:
    """Up to 4 ranks on ``--device``, started by the first test that needs them and kept for the session.

    With ``--ranks N`` tests have as many, and with ``--quick`` 2, unless they are marked as ``four``.
    """
    most = 2 if request.config.getoption("quick") else request.config.getoption("ranks")
    _pool.most = max(most, _ranks(request.node), 4 if request.node.get_closest_marker("four") else 0)
    return _pool


@pytest.fixture(scope="session")
def _examined() -> dict[Any, Any]:
    return {}


@pytest.fixture
def judge(request: pytest.FixtureRequest, pool: WorkerPool, _examined: dict[Any, Any]) -> Examination:
    """The examination of one case at one size; each of its sections runs once in a session."""
    from shardcore_testing.conformance import Examination

    subject, timeout, _ = request.param
    key = (request.cls, subject.case.name, subject.tp)
    if key not in _examined:
        _examined[key] = Examination(pool, subject, timeout)
    examination: Examination = _examined[key]
    return examination


@pytest.fixture(scope="session")
def _discovered(request: pytest.FixtureRequest) -> dict[str, Finding]:
    """What a fresh process says about the plugins of all tests of this session."""
    from shardcore_testing.conformance import PolicyConformance, discoveries

    kits = [getattr(item, "cls", None) for item in request.session.items]
    return discoveries(sorted({kit.plugin for kit in kits if kit is not None and issubclass(kit, PolicyConformance)}))


@pytest.fixture
def fresh(
    request: pytest.FixtureRequest, pool: WorkerPool, _examined: dict[Any, Any], _discovered: dict[str, Finding]
) -> dict[str, Finding]:
    """What a fresh process, and processes of different hash seeds, say about the pack of a `PolicyConformance`."""
    from shardcore_testing.conformance import plan_findings

    kit = request.cls
    if kit not in _examined:
        quick = request.config.getoption("quick")
        ranks = 2 if quick else min(pool.size, request.config.getoption("ranks"))
        findings = [_discovered[kit.plugin]]
        findings += plan_findings(pool, kit.plugin, kit.all_cases(), ranks=ranks, quick=quick)
        _examined[kit] = {finding.check: finding for finding in findings}
    found: dict[str, Finding] = _examined[kit]
    return found
