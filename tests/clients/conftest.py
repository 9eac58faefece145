from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardcore_testing.islands import no_float32_islands


@pytest.fixture
def float64_throughout() -> Iterator[None]:
    """Norms, softmaxes and losses of transformers compute in float64 too, on the ranks as well."""
    with no_float32_islands():
        yield
