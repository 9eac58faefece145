"""Makes `bert_cases` importable, here and in the workers of the pool, which inherit the search path."""

import sys
from pathlib import Path

import pytest

from shardcore.testing import no_float32_islands

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _float64_throughout():
    """Bounds are those of float64, on every processor; the ranks follow."""
    with no_float32_islands():
        yield
