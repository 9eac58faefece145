"""What a release changes is told, and the ceiling of what is tested moves."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from newest_release import raised, table  # noqa: E402  # from tools/

METADATA = """
[project.optional-dependencies]
timm = ["timm>=1.0.23", "torch>=2.12"]
tested = ["transformers>=4.57.6,<5.25", "timm>=1.0.23,<1.0.32"]

[tool.shardcore.matrix]
transformers = ["4.57.6", "5.24.0"]
timm = ["1.0.23", "1.0.31"]
"""
OLD = {
    "release": "5.24.0",
    "classes": {"A": "a", "Gone": "b"},
    "cases": {
        "p same": {"holds": {"x": "(2,)"}, "plan": "1"},
        "p renamed": {"holds": {"x": "(2,)"}, "plan": "1"},
        "p broken": {"holds": {}, "plan": "1"},
    },
}
NEW = {
    "release": "5.25.0",
    "classes": {"A": "a", "New": "c", "Other": "c"},
    "cases": {
        "p same": {"holds": {"x": "(2,)"}, "plan": "1"},
        "p renamed": {"holds": {"y": "(2,)"}, "plan": "2"},
        "p broken": {"error": "KeyError: 'q | k'"},
    },
}


def test_a_table_of_what_changes() -> None:
    measured = {"New": {"state": "exact", "way": "inferred", "split": 0.9}}
    text = table(OLD, NEW, {"test_x": "wrong\nat once"}, measured)
    assert text.startswith("# 5.25.0 after 5.24.0\n")
    assert "## Tests of packs that fail: 1\n\n| test | why |\n|---|---|\n| test_x | wrong at once |" in text
    assert "## Cases that change: 2\n" in text
    assert "| p broken | cannot be planned: KeyError: 'q / k' |" in text
    assert "| p renamed | gone: x; new: y; another plan |" in text
    assert "p same" not in text
    assert "| Gone | b |" in text
    assert "| New | c | exact, inferred, 0.90 split |" in text
    assert "| Other | c | not measured |" in text


def test_nothing_changes() -> None:
    text = table(OLD, OLD, {}, {})
    assert text.count(": none") == 4


@pytest.mark.parametrize(
    ("library", "release", "lines"),
    [
        ("transformers", "5.25.1", ('"4.57.6", "5.24.0", "5.25.1"]', '"transformers>=4.57.6,<5.26"')),
        ("timm", "1.0.40", ('timm = ["1.0.23", "1.0.31", "1.0.40"]', '"timm>=1.0.23,<1.0.41"')),
    ],
)
def test_the_ceiling_moves(library: str, release: str, lines: tuple[str, ...]) -> None:
    found = raised(METADATA, library, release)
    assert all(line in found for line in lines)
    assert 'timm = ["timm>=1.0.23", "torch>=2.12"]' in found
    assert len(found.splitlines()) == len(METADATA.splitlines())


@pytest.mark.parametrize(("library", "release"), [("transformers", "5.24.0"), ("peft", "1.0")])
def test_what_is_tested_already_or_unknown_is_refused(library: str, release: str) -> None:
    with pytest.raises(ValueError, match=r"already|no releases"):
        raised(METADATA, library, release)
