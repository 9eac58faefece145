"""The page of errors: how it is written, and that none of its numbers is above the bound."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from exactness import PAGE, Row, _worst, page  # noqa: E402  # from tools/

from shardcore_testing.findings import Finding  # noqa: E402

BOUND = 1e-12


def test_sections_of_other_releases_stay():
    old = page([Row("A", ("1e-15", "", "", "", "", "", ""))], "transformers 5.0.0, torch 2.13.0")
    both = page([Row("B", ("2e-15", "", "", "", "", "", ""))], "transformers 5.23.0, torch 2.13.0", old)
    assert both.index("## transformers 5.23.0") < both.index("## transformers 5.0.0")
    assert "| A | 1e-15 |" in both
    again = page([Row("B", ("0", "", "", "", "", "", ""))], "transformers 5.23.0, torch 2.13.0", both)
    assert "| B | 2e-15 |" not in again
    assert again.count("| B |") == 1
    assert page([], "transformers 5.0.0, torch 2.13.0", again).count("\n## ") == 2


def test_cells(capsys):
    passed = [Finding(check="loss", state="passed", error=e) for e in (0.0, 3.2e-15, None)]
    assert _worst(passed) == "3e-15"
    assert _worst(passed[:1]) == "0"
    assert _worst([Finding(check="split logits", state="closed", message="no head")]) == ""
    assert _worst([*passed, Finding(check="loss", state="failed", message="0.1")]) == "failed"
    assert "loss 0.1" in capsys.readouterr().err


def test_every_number_is_below_the_bound():
    text = PAGE.read_text(encoding="utf-8")
    assert "failed" not in text
    numbers = [float(cell) for cell in re.findall(r"(?<=\| )[\d.]+e[-+]\d+(?= \|)", text)]
    assert len(numbers) > 100
    assert max(numbers) <= BOUND


def test_every_pack_is_in_it():
    newest = PAGE.read_text(encoding="utf-8").split("\n## ")[1]
    rows = newest.count("\n| ") - 1
    packs = [folder for folder in (ROOT / "packs").glob("shard-*") if folder.name != "shard-torch"]
    assert rows >= len(packs)
