"""What the pages of these libraries show runs; `tests/test_docs.py` runs the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from test_docs import DOCS, _blocks, _run

#: What each is about.
LIBRARIES = {
    "trl.md": "trl",
    "sentence-transformers.md": "sentence_transformers",
    "pipelines.md": "transformers",
    "timm.md": "timm",
    "quantized.md": "torchao",
}

pytestmark = [
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "DeprecationWarning", "UserWarning")
]  # of the libraries, about their own and each other's settings


@pytest.mark.parametrize(
    ("page", "world"),
    [
        ("trl.md", 2),
        ("trl.md", 4),
        ("sentence-transformers.md", 2),
        ("pipelines.md", 2),
        ("timm.md", 2),
        ("quantized.md", 2),
    ],
)
def test_code_runs(pool, page, world, tmp_path):
    pytest.importorskip(LIBRARIES[page], reason=f"{page} is about a library that is not installed")
    blocks = [(code, worlds) for language, code, worlds in _blocks(DOCS / page) if language == "python"]
    assert all(worlds for _, worlds in blocks)  # nothing here is only shown
    pool.run(_run, [code for code, worlds in blocks if world in worlds], str(tmp_path), world=world, timeout=100)
