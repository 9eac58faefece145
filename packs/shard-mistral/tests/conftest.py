"""Bounds are those of float64, on every processor; the ranks follow."""

import pytest

from shardcore.testing import no_float32_islands


@pytest.fixture(autouse=True)
def _float64_throughout():
    with no_float32_islands():
        yield
