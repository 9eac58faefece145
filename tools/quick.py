"""A pytest plugin of the quick run: a test that takes too long has failed, unless it says why it may.

The limit is for the test itself: what fixtures make once, and the start of the ranks, does not count. It is that of a
machine with a core for each process that runs, and longer where there are fewer, as the limits of the pool are.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest

from shardcore_testing.processes import slowness

LIMIT = 15.0  # seconds


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Let a test fail that took longer than the limit."""
    report = yield
    if (
        call.when == "call"
        and report.passed
        and call.duration > LIMIT * slowness()
        and item.get_closest_marker("slow") is None
    ):
        report.outcome = "failed"
        report.longrepr = (
            f"it took {call.duration:.0f} s, and the limit of the quick run is {LIMIT:.0f}: make it quicker, leave it "
            'to the nightly run (@pytest.mark.nightly), or say why it may (@pytest.mark.slow("why"))'
        )
    return report
