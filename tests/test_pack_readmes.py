"""The README of a pack lists the classes that it serves now."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from pack_readmes import current, main  # noqa: E402  # from tools/

PACKS = sorted(path.name for path in (ROOT / "packs").glob("shard-*"))
MODELS = "# Models\n\n## shard-a\n\na 1\n\n| a | tp |\n|---|---|\n| `A` | 2 |\n\n## shard-b\n\n| b | tp |\n"


@pytest.mark.parametrize("pack", PACKS)
def test_the_classes_are_those_of_the_page_of_models(pack):
    text = (ROOT / "packs" / pack / "README.md").read_text(encoding="utf-8")
    models = (ROOT / "MODELS.md").read_text(encoding="utf-8")
    assert current(pack, text, models) == text, "write it again: python tools/pack_readmes.py --write"


@pytest.mark.parametrize("pack", PACKS)
def test_every_readme_has_an_example_that_runs(pack):
    assert "<!-- run: 2 ranks -->\n```python\n" in (ROOT / "packs" / pack / "README.md").read_text(encoding="utf-8")


def test_what_stands_around_the_classes_is_kept():
    text = current("shard-a", "# shard-a\n\nWords.\n\n## Classes\n\n| old |\n\n## Tested with\n\nMore.\n", MODELS)
    assert text.startswith("# shard-a\n\nWords.\n\n## Classes\n\na 1\n\n| a | tp |\n|---|---|\n| `A` | 2 |\n\n*tp*: ")
    assert text.endswith("\n\n## Tested with\n\nMore.\n")
    assert "old" not in text
    assert "| b |" not in text
    assert current("shard-a", text, MODELS) == text


def test_a_readme_without_the_heading_is_told():
    with pytest.raises(ValueError, match="shard-a: there is no heading 'Classes'"):
        current("shard-a", "# shard-a\n", MODELS)


def test_nothing_is_to_be_written():
    assert main([]) == 0
