from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The models that several test modules share; the workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from given_packs import installed  # from support/


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """A folder for distributions, on `sys.path`."""
    with installed(tmp_path):
        yield tmp_path
