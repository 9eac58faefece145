from __future__ import annotations

from pathlib import Path

import pytest
from sites import Site


@pytest.fixture
def site(target: Path) -> Site:
    return Site(target)
