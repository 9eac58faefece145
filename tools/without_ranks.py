"""A pytest plugin that runs tests that need no ranks, or those that do: ``pytest -p without_ranks --without-ranks``."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--without-ranks`` and ``--on-ranks``."""
    parser.addoption("--without-ranks", action="store_true", help="leave out tests that use ranks")
    parser.addoption("--on-ranks", action="store_true", help="leave out tests that do not")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Look for who uses the fixture ``pool``, directly or through another one, and for the marker ``ranks``."""
    without, on = config.getoption("without_ranks"), config.getoption("on_ranks")
    if without or on:
        left_out = [item for item in items if _on_ranks(item) == without]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if _on_ranks(item) != without]


def _on_ranks(item: pytest.Item) -> bool:
    return "pool" in getattr(item, "fixturenames", ()) or item.get_closest_marker("ranks") is not None
