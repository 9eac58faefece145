"""What READMEs, pages and docstrings say of releases, requirements and names is what the code says."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.version import Version

from shardcore import clients
from shardcore.plugins.registry import GROUP
from shardcore.plugins.unserved import first_party
from shardcore_cli import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "shardcore" / "src" / "shardcore"
#: Groups of entry points, whose names look like those of modules.
GROUPS = (GROUP, clients.GROUP, app.GROUP)
READMES = [ROOT / "README.md", *sorted(ROOT.glob("*/README.md")), *sorted(ROOT.glob("packs/*/README.md"))]
PAGES = [*READMES, *sorted((ROOT / "docs").rglob("*.md"))]
RELEASE = re.compile(r"\b(?:0\.[3-9]|1\.0)\b(?!\.\d| ?%)")


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# The others have tables of measurements.
@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name not in ("adr", "benchmarks", "tests")], ids=name)
def test_no_table_promises_a_release(page):
    """What is not there yet is in docs/roadmap.md, without numbers."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    assert [row for row in re.findall(r"^\|.*\|$", text, re.M) if RELEASE.search(row)] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "shardcore" / "README.md"], ids=name)
def test_the_requirements_that_a_readme_names_are_those_of_the_metadata(page):
    metadata = project(ROOT / "shardcore")["project"]
    floors = {"python": metadata["requires-python"].removeprefix(">=")}
    floors |= {line.partition(">=")[0]: line.partition(">=")[2] for line in metadata["dependencies"] if ">=" in line}
    text = page.read_text()
    (python,) = set(re.findall(r"Python (3\.\d+)", text))
    (torch,) = set(re.findall(r"(?:torch|PyTorch) (2\.\d+) or newer", text))
    assert (python, torch) == (floors["python"], floors["torch"])


@pytest.mark.parametrize("page", [READMES[0], ROOT / "docs" / "index.md"], ids=name)
def test_the_ranges_that_a_first_page_names_are_those_of_the_packs(page):
    matrices = [project(ROOT / "packs" / pack)["tool"]["shardcore"]["matrix"] for pack in first_party()]
    text = " ".join(page.read_text().split())
    for library in ("transformers", "timm"):
        releases = sorted({Version(r) for matrix in matrices for r in matrix.get(library, ())})
        ((lowest, highest),) = re.findall(rf"\b{library} (\d[\d.]*) to (\d[\d.]*\d)", text)
        assert Version(lowest) == releases[0], library
        assert f"{releases[-1]}.".startswith(f"{highest}."), library


def _served(pack: str) -> set[str]:
    """Return the names of the classes that the plugin of a pack offers policies for."""
    plugin = importlib.import_module(f"{pack.replace('-', '_')}.plugin")
    return {spec.target.rpartition(".")[2] for spec in plugin.shardcore_policies()}


def _listed() -> dict[str, list[str]]:
    """Return the classes that MODELS.md lists, by pack."""
    sections = re.split(r"^## (.+)\n", (ROOT / "MODELS.md").read_text(), flags=re.M)[1:]
    tables = zip(sections[::2], sections[1::2], strict=True)
    return {pack: re.findall(r"^\| `(\w+)` \|", text, re.M) for pack, text in tables}


def test_the_first_page_is_read_in_three_minutes():
    assert READMES[0].read_text().count("\n") <= 160, "what else there is to say stands in docs"


def test_the_numbers_of_the_readme_are_those_that_were_recorded():
    """What was measured is recorded once, on the pages that these numbers link to."""
    text = READMES[0].read_text()
    claims = text.partition("\n## Why this one\n")[2].partition("\n**Your model")[0]
    claims += "".join(re.findall(r"^\| on GPUs.*$", text, re.M))
    pages = [(ROOT / "docs" / f"{page}.md").read_text() for page in ("tuning", "gpu", "exactness", "migration", "faq")]
    number = re.compile(r"\d+(?:[.,]\d+)*(?:e-\d+)?")
    recorded = {found for page in pages for found in number.findall(page)}
    shown = [found for found in number.findall(claims) if len(found) > 2]
    assert {"2,004", "1159", "2e-14"} <= set(shown)
    assert [found for found in shown if found not in recorded] == []


def test_the_readme_counts_the_classes_and_packs_that_there_are():
    ((classes, packs),) = re.findall(r"(\d+) classes in (\d+) packs", READMES[0].read_text())
    assert _listed().keys() == first_party()
    assert (int(classes), int(packs)) == (sum(map(len, _listed().values())), len(first_party()))


@pytest.mark.parametrize("pack", sorted(first_party()))
def test_the_classes_that_are_listed_are_served(pack):
    pytest.importorskip(f"{pack.replace('-', '_')}.plugin")
    assert sorted(_listed()[pack]) == sorted(_served(pack))
    own = (ROOT / "packs" / pack / "README.md").read_text()
    heads = {5: "five", 8: "eight"}.get(len(_served(pack)) - 1)
    assert all(found == heads for found in re.findall(r"\bits (\w+) heads\b", own))


@pytest.mark.parametrize("pack", sorted(first_party()))
def test_the_torch_that_a_packs_readme_names_is_one_of_its_metadata(pack):
    metadata = project(ROOT / "packs" / pack)["project"]
    lines = [*metadata["dependencies"], *(line for e in metadata["optional-dependencies"].values() for line in e)]
    floors = {line.partition(">=")[2] for line in lines if line.startswith("torch>=")}
    assert set(re.findall(r"torch (2\.\d+)", (ROOT / "packs" / pack / "README.md").read_text())) <= floors


@pytest.mark.parametrize("pack", sorted(first_party()))
def test_what_is_said_to_raise_is_not_what_its_policies_let_in(pack):
    sources = "".join(file.read_text() for file in (ROOT / "packs" / pack).glob("src/**/*.py"))
    let_in = set(re.findall(r'"(\w+)"', " ".join(re.findall(r"\bcalls\((.*?)\)", sources, re.S))))
    families = (ROOT / "docs" / "families.md").read_text() + "\n## "
    said = families.partition(f"\n## {pack}\n")[2].partition("\n## ")[0]
    text = " ".join((ROOT / "packs" / pack / "README.md").read_text().split() + said.split())
    for sentence in re.split(r"(?<=[.:]) ", text):
        if re.search(r"\brais(?:e|es)\b|\brefused\b", sentence):
            assert not set(re.findall(r"`(\w+)`", sentence)) & let_in, sentence


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_not_published_is_installed_from_a_checkout(page):
    ours = {"shardcore", *first_party()}
    for found in re.findall(r"\bpip install ([^\n]*)", page.read_text()):
        line = re.sub(r"#.*|-e \S+", "", found)
        words = {re.split(r"[\[=<>]", word.strip("\"'`;,"))[0] for word in line.split()}
        assert not words & ours, line


def _undefined(code: str) -> set[str]:
    """Return the names that a block of code uses and nowhere defines."""
    nodes = list(ast.walk(ast.parse(code)))
    used = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    defined = {node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    defined |= {node.name for node in nodes if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    defined |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return used - defined - set(dir(builtins))


@pytest.mark.parametrize("page", READMES, ids=name)
def test_code_in_a_readme_defines_what_it_uses(page):
    before = ""  # a later block may go on from an earlier one
    for code in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.M | re.S):
        before += code
        assert _undefined(before) == set()


@pytest.mark.parametrize("page", READMES, ids=name)
def test_links_of_a_readme_lead_somewhere(page):
    for path, anchor in re.findall(r"\]\(([^)#:\s]+)(?:#([\w-]+))?\)", page.read_text()):
        file = page.parent / path
        assert file.exists(), path
        headings = re.findall(r"^#+ (.*)$", file.read_text(), re.M) if anchor else []
        assert not anchor or anchor in {re.sub(r"\s+", "-", heading.lower()) for heading in headings}, anchor


def _named() -> list[tuple[str, str]]:
    """Return (file, name) for every name of ours in backticks that begins with ``shardcore.``."""
    files = [*PAGES, *sorted(SOURCE.rglob("*.py"))]
    found = [(name(f), n) for f in files for n in re.findall(r"`(shardcore(?:\.\w+)+)`", f.read_text())]
    return sorted({(file, text) for file, text in found if text not in GROUPS})


def _exists(text: str) -> bool:
    module, _, rest = text.partition(".")
    value = importlib.import_module(module)
    for part in rest.split("."):
        module = f"{module}.{part}"
        try:
            value = importlib.import_module(module)
        except ImportError as error:
            if not (error.name or "shardcore").startswith("shardcore"):
                return True  # the module is there, and about a library that is not
            if not hasattr(value, part):
                return False
            value = getattr(value, part)
    return True


def test_names_in_backticks_exist():
    named = _named()
    assert len(named) > 50
    assert [(file, text) for file, text in named if not _exists(text)] == []
    assert not _exists("shardcore.apply.sharder.prepare")
