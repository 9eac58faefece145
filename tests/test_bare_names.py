"""Modules that tests and tools import by their bare names have names of their own: all of them share one path."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What tests put on the path, in one process.
FOLDERS = ("tools", "tests", "tests/fuzz", "tests/support", "tests/clients/support", "shardcore/tests/support")


def test_no_two_modules_share_a_name():
    found = Counter(file.stem for folder in FOLDERS for file in (ROOT / folder).glob("*.py"))
    assert found["search"] == found["cells"] == 1, "the folders have moved"
    assert [name for name, times in found.items() if times > 1 and name != "__init__"] == []
