"""Pipelines, tensor parallelism and replicas at once, on eight ranks: ``nox -s eight``; too much for every run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardcore_testing import WorkerPool
from shardcore_testing.islands import no_float32_islands

sys.path.insert(0, str(Path(__file__).parent))

from test_engine import FAMILIES, trains  # of this folder


@pytest.fixture(scope="module")
def eight() -> Iterator[WorkerPool]:
    with WorkerPool(8, collective_timeout=120.0) as pool, no_float32_islands():
        yield pool


TOKENS = {"enable_sequence_parallelism": True, "sp_size": 2}


@pytest.mark.parametrize(
    ("family", "options"),
    [
        *((family, {"zero_stage": 1}) for family in FAMILIES),
        ("llama", {"zero_stage": 1, "pp_style": "interleaved_zero_bubble", **TOKENS}),
        ("llama", {"zero_stage": 0, "pp_style": "zbv"}),
        ("llama", {"zero_stage": 3, **TOKENS}),
        ("bert", {"zero_stage": 1, "pp_style": "interleaved", "partial_gradients": "deferred", **TOKENS}),
    ],
    ids=str,
)
def test_all_axes(eight: WorkerPool, family: str, options: dict[str, Any]) -> None:
    eight.run(trains, family, {"tp_size": 2, "pp_size": 2, **options}, world=8, timeout=200)
