"""MODELS.md says of every class what the packs' cases say."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import model_table  # noqa: E402  # from tools/
from cells import find_packs  # noqa: E402  # from tools/


@pytest.mark.nightly
def test_the_page_is_what_the_cases_say():
    text = (ROOT / "MODELS.md").read_text(encoding="utf-8")
    assert model_table.page(find_packs(ROOT), text) == text, "write it again: python tools/model_table.py --write"


def test_rows_of_a_library_that_is_not_here_are_kept(monkeypatch):
    monkeypatch.setattr(model_table, "_is_here", lambda library: library != "timm")
    pack = next(pack for pack in find_packs(ROOT) if pack.name == "shard-vit")
    table = "| timm | tp |\n|---|---|\n| `{}` | 2 |\n"
    before = f"# Models\n\n## shard-vit\n\n{table.format('Old')}\n## shard-whisper\n\n{table.format('No')}"
    text = model_table.page([pack], before)
    assert "\n| `Old` | 2 |\n" in text
    assert "`VisionTransformer`" not in text
    assert "`No`" not in text
    assert "| `ViTModel` | 2 4 | ✓ |" in text
