"""The pytest plugin: ``-p shardcore.testing.plugin``, or ``pytest_plugins`` in the conftest of the root folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardcore.testing.pool import WorkerPool

__all__ = ["pool"]


@pytest.fixture(scope="session")
def pool() -> Iterator[WorkerPool]:
    """Up to 4 gloo ranks, started by the first test that needs them and kept until the session ends."""
    with WorkerPool() as workers:
        yield workers
