"""Bounds are those of float64."""

import pytest

from shardcore.testing import no_float32_islands


@pytest.fixture(autouse=True)
def _float64_throughout(request):
    """Bounds are those of float64, on every processor; the ranks follow."""
    if request.node.get_closest_marker("islands"):
        yield
        return
    with no_float32_islands():
        yield
