"""What tests of sharded models share: a pool of worker processes that lives as long as the test session.

Nothing here needs pytest; the fixture ``pool`` is in ``shardcore.testing.plugin``.
"""

from __future__ import annotations

from shardcore.testing.pool import WorkerError, WorkerPool, WorkerTimeout

__all__ = ["WorkerError", "WorkerPool", "WorkerTimeout"]
