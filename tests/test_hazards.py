"""The catalogue of hazards: what names a number finds it there, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardcore_testing.checks import CHECKS
from shardcore_testing.findings import Ledger

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "hazards.md").read_text(encoding="utf-8")
ROOMS = ("shardcore/tests", "clients/*/tests", "kit/*/tests", "packs/*/tests", "tests")
SOURCES = [
    *(file for room in ("shardcore", "clients", "kit", "packs", "tests") for file in (ROOT / room).rglob("*.py")),
    *(ROOT / "docs").rglob("*.md"), *ROOT.glob("packs/*/README.md"), ROOT / "README.md", ROOT / "tests" / "README.md",
]  # fmt: skip

#: Number -> what the catalogue says of it.
ENTRIES = {found[1]: found[2] for found in re.finditer(r"^## (H\d+)\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)}
TEST = re.compile(r"`([\w./-]*\.py)((?:::\w+)*)(?:\[[^`]*\])?`")


def names_in(file: Path) -> set[str]:
    """Return the names of tests of a file; those of the kit too where it is inherited."""
    text = file.read_text(encoding="utf-8")
    names = set(re.findall(r"^ *def (test_\w+)", text, re.M))
    return names | {f"test_{check.replace(' ', '_')}" for check in CHECKS if "PolicyConformance" in text}


def missing(text: str) -> list[str]:
    """Return the tests that a text names and that do not exist; a name without a folder is looked for everywhere."""
    everywhere = [file for room in ROOMS for file in ROOT.glob(f"{room}/**/*.py")]
    gone = []
    for path, rest in TEST.findall(text):
        if not path.rpartition("/")[2].startswith("test_"):
            continue
        files = [file for file in everywhere if f"/{file.relative_to(ROOT).as_posix()}".endswith(f"/{path}")]
        wanted = set(re.findall(r"test_\w+", rest))
        if not any(wanted <= names_in(file) for file in files):
            gone.append(path + rest)
    return gone


def test_numbers_are_complete_and_in_order():
    assert list(ENTRIES) == [f"H{number}" for number in range(1, len(ENTRIES) + 1)]
    for number, text in ENTRIES.items():
        assert re.match(r"\n\*\*", text), number
        assert "\n- Shipped by: " in text, number
        assert "\n- Here: " in text, number


def test_every_number_that_is_named_is_in_the_catalogue():
    named = {
        (number, file.relative_to(ROOT).as_posix())
        for file in SOURCES
        for number in re.findall(r"\bH\d{1,2}\b", file.read_text(encoding="utf-8"))
    }
    assert len({number for number, _ in named}) > 20
    assert {(number, file) for number, file in named if number not in ENTRIES} == set()


@pytest.mark.parametrize("number", ENTRIES)
def test_what_an_entry_names_exists(number):
    text = " ".join(ENTRIES[number].split())
    for names in re.findall(r"\bchecks? ((?:`[\w ]+`(?:, | and )?)+)", text):
        assert set(re.findall(r"`([^`]+)`", names)) <= CHECKS.keys()
    assert missing(text) == []
    # What is here already is noticed by something.
    assert "Noticed by: " in text or "[not in this release]" in text


def test_the_record_of_mutations_names_tests_that_exist():
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    assert len(TEST.findall(text)) > 150
    assert missing(text) == []
    assert missing("`test_hazards.py::test_that_is_gone`") == ["test_hazards.py::test_that_is_gone"]


def test_a_finding_leads_to_the_hazards_that_it_names():
    ledger = Ledger(("dropout",), 1e-9)
    ledger.failed("ranks draw different numbers (H6, H40)")
    ledger.failed("every rank draws the same numbers (H6)")
    (finding,) = ledger.findings()
    assert finding.hazards == ("H6", "H40")
    assert finding.explained().splitlines()[-1] == "See docs/hazards.md#h6, docs/hazards.md#h40"
    ledger = Ledger(("dropout",), 1e-9)
    ledger.failed("other")
    assert ledger.findings()[0].explained() == "other"
