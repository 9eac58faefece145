"""A pytest plugin that leaves out the tests that need ranks: ``pytest -p without_ranks --without-ranks``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--without-ranks``."""
    parser.addoption("--without-ranks", action="store_true", help="leave out tests that use the pool of ranks")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what uses the fixture ``pool``, directly or through another one."""
    if config.getoption("without_ranks"):
        needing = [item for item in items if "pool" in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=needing)
        items[:] = [item for item in items if item not in needing]
