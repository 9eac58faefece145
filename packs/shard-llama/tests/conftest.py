"""Makes `llama_cases` importable, here and in the workers of the pool, which inherit the search path."""

import sys
from pathlib import Path

import pytest

from shardcore.testing import no_float32_islands

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _float64_throughout(request):
    """Bounds are those of float64, on every processor; the ranks follow."""
    if request.node.get_closest_marker("islands"):
        yield
        return
    with no_float32_islands():
        yield
