"""What tests of the kit share with the core's: its small models, and a folder for distributions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parents[1] / "shardcore" / "tests" / "support"))

from given_packs import installed  # from support/


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Path]:
    """A folder for distributions, on `sys.path`."""
    with installed(tmp_path):
        yield tmp_path
