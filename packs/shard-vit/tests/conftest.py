"""Makes `vit_cases` importable, here and in the workers of the pool, which inherit the search path."""

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


def pytest_configure(config) -> None:
    # timm 1.0.23 scripts functions while it is imported, which torch 2.14 deprecates; the workers warn as we do.
    config.addinivalue_line("filterwarnings", "ignore:.torch.jit.[a-z_]+. is deprecated:FutureWarning")
