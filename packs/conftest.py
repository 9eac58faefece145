"""What the tests of all packs share: modules beside them can be imported, here and in the workers of the pool."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardcore_testing import no_float32_islands


def pytest_collect_file(file_path: Path) -> None:
    """Put the folder of a pack's tests on the search path, which the workers inherit."""
    if (folder := str(file_path.parent)) not in sys.path:
        sys.path.insert(0, folder)


@pytest.fixture(autouse=True)
def _float64_throughout(request: pytest.FixtureRequest) -> Iterator[None]:
    """Bounds are those of float64, on every processor; the ranks follow."""
    if request.node.get_closest_marker("islands"):
        yield
        return
    with no_float32_islands():
        yield
