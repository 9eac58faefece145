"""What is promised to authors of packs exists, and the packs of this repository use nothing else."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## What is promised")[2].partition("\nOf each module")[0]
PROMISED = {"shardcore", *re.findall(r"`(shardcore\w*(?:\.[a-z]\w*)*)(?:\.__all__)?`", TABLE)}
#: But what is for people who train by timm, a client that lives in its pack.
FILES = sorted({*ROOT.glob("packs/*/src/**/*.py")} - {ROOT / "packs/shard-vit/src/shard_vit/timm_training.py"})


def imported(source: str) -> list[tuple[str, str]]:
    """Return (module, name) of every import of shardcore; the name is empty for a module as such."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("shardcore"):
            found += [(str(node.module), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name.startswith("shardcore")]
    return found


def unpromised(source: str) -> list[tuple[str, str]]:
    return [
        (module, name)
        for module, name in imported(source)
        if module not in PROMISED or (name and name not in importlib.import_module(module).__all__)
    ]


def test_what_is_promised_exists():
    assert len(PROMISED) > 7
    for module in PROMISED:
        assert importlib.import_module(module).__all__, module


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT / "packs").as_posix())
def test_packs_use_what_is_promised(file):
    if "transformers" in file.read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    assert unpromised(file.read_text(encoding="utf-8")) == []


def test_what_is_not_promised_is_found():
    for line in ("from shardcore.comm.dtensor_params import local_tensor", "from shardcore.hooks import pluggy",
                 "import shardcore.nn.base"):  # fmt: skip
        assert unpromised(line)
    assert unpromised("from shardcore.hooks import hookimpl\nimport shardcore") == []
