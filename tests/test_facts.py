"""What READMEs, pages and docstrings say of releases, requirements and names is what the code says."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import shardcore
from shardcore import _planned, clients
from shardcore.config import ShardConfig
from shardcore.errors import NotSupportedError
from shardcore.hooks import PolicySpec
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

#: Of everything that is planned: by its name in code, and by the words for it.
RELEASES = {
    **{name: planned.release for name, planned in {**_planned.FIELDS, **_planned.NAMES}.items()},
    **_planned.features(),
}


def project(folder: Path) -> dict:
    return tomllib.loads((folder / "pyproject.toml").read_text())


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_every_planned_value_is_refused_with_its_release():
    asked = {
        "context_parallel_size": 2,
        "tensor_parallel_mode": "2d", "enable_sequence_overlap": True,
        "fp8_communication": True,
        "make_vocab_size_divisible_by": 64, "enable_flash_attention": "xformers",
        "sequence_parallelism_mode": "ring",
    }  # fmt: skip
    assert asked.keys() == _planned.FIELDS.keys()
    for field, value in asked.items():
        assert value not in _planned.FIELDS[field].works
        with pytest.raises(NotSupportedError, match=rf"release {re.escape(RELEASES[field])}\b"):
            ShardConfig(**{field: value, "enable_sequence_parallelism": "mode" in field})


def test_nothing_that_is_planned_for_this_release_or_an_earlier_one_is_missing():
    def key(release: str) -> list[int]:
        return [int(part) for part in release.split(".")]

    assert all(key(release) > key(shardcore.__version__) for release in RELEASES.values())


def test_the_docstring_of_the_configuration_names_the_releases():
    text = ast.get_docstring(next(n for n in ast.parse((SOURCE / "config" / "shard_config.py").read_text()).body
                                  if isinstance(n, ast.ClassDef) and n.name == "ShardConfig"))  # fmt: skip
    items = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |^\w|\Z)", text, re.M | re.S)
    said = {field: set(RELEASE.findall(body)) for field, body in items if RELEASE.search(body)}
    assert said == {field: {planned.release} for field, planned in _planned.FIELDS.items()}


def test_the_page_on_shardformer_names_the_releases():
    rows = [line for line in (ROOT / "docs" / "compat.md").read_text().splitlines() if line.startswith("|")]
    for planned in (*_planned.FIELDS, *_planned.NAMES):
        said = [set(RELEASE.findall(row)) for row in rows if f"`{planned}`" in row]
        assert said or planned in _planned.FIELDS, planned  # not every field comes from there
        assert all(found == {RELEASES[planned]} for found in said), (planned, said)


def _unexplained(row: str) -> set[str]:
    """Return the releases that a row of a table names and the table of what is planned does not give it."""
    known = {**RELEASES, **{option: planned.release for option, planned in _planned.LAYER_OPTIONS.items()}}
    named = {known[word] for word in re.findall(r'`"?(\w+)"?`', row) if word in known}
    others = {release for words, release in _planned.OTHERS.items() if words in row}
    return set(RELEASE.findall(row)) - named - others


# The others have tables of measurements.
@pytest.mark.parametrize("page", [p for p in PAGES if p.parent.name not in ("adr", "benchmarks", "tests")], ids=name)
def test_every_release_that_a_table_names_is_from_the_table_of_what_is_planned(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    for row in re.findall(r"^\|.*\|$", text, re.M):
        assert _unexplained(row) == set(), row


def test_a_release_that_nothing_gives_is_found():
    assert _unexplained("| `PaddingEmbedding` | 0.5 | |") == set()
    assert _unexplained("| `PaddingEmbedding` | 0.4 | |") == {"0.4"}
    assert _unexplained("| `Other` | 0.4 | |") == {"0.4"}


def test_what_only_the_documentation_names_is_there():
    rows = [row for page in PAGES for row in re.findall(r"^\|.*\|$", page.read_text(), re.M)]
    for words, release in _planned.OTHERS.items():
        assert any(words in row and release in RELEASE.findall(row) for row in rows), words


def test_the_page_on_shardformer_names_the_options_of_layers():
    page = (ROOT / "docs" / "compat.md").read_text().partition("| option | accepted | others |")[2].partition("\n\n")[0]
    rows = {
        option: set(RELEASE.findall(row)) for row in page.splitlines() for option in re.findall(r"`(\w+)`", row[:80])
    }
    fields = {"make_vocab_size_divisible_by"}  # of the configuration too, where it is listed
    wanted = {option: {planned.release} for option, planned in _planned.LAYER_OPTIONS.items() if option not in fields}
    assert {option: rows.get(option) for option in wanted} == wanted


@pytest.mark.parametrize("page", READMES, ids=name)
def test_what_a_readme_calls_planned_is(page):
    text = " ".join(page.read_text().split())
    for clause in re.findall(r"([^.(|;:]*?) (?:is|are) planned", text):
        words = re.split(r", | and ", clause.strip())
        assert set(words) <= RELEASES.keys(), words
    for row in re.findall(r"^\| ([^|]+) \| not yet\b", page.read_text(), re.M):
        assert set(re.findall(r"`(\w+)`", row)) <= RELEASES.keys()


def test_the_readme_lists_what_is_not_there_yet():
    (row,) = re.findall(r"^\| ([^|]+) \| not yet\b", READMES[0].read_text(), re.M)
    for words in ("context", "`enable_sequence_overlap`", "xFormers"):
        assert words in row
    assert any("context" in feature for feature in _planned.features())


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "shardcore" / "README.md"], ids=name)
def test_the_requirements_that_a_readme_names_are_those_of_the_metadata(page):
    metadata = project(ROOT / "shardcore")["project"]
    floors = {"python": metadata["requires-python"].removeprefix(">=")}
    floors |= {line.partition(">=")[0]: line.partition(">=")[2] for line in metadata["dependencies"] if ">=" in line}
    text = page.read_text()
    (python,) = set(re.findall(r"Python (3\.\d+)", text))
    (torch,) = set(re.findall(r"(?:torch|PyTorch) (2\.\d+) or newer", text))
    assert (python, torch) == (floors["python"], floors["torch"])


def test_the_ranges_that_the_readme_names_are_those_of_the_packs():
    rows = re.findall(
        r"^\| `(shard-[\w-]+)(?:\[\w+\])?` \| `(\w+).*\| (\w+) ([\d.]+) to ([\d.]+) \|$", READMES[0].read_text(), re.M
    )
    assert {pack for pack, *_ in rows} == first_party()
    for pack, model, library, lowest, highest in rows:
        releases = project(ROOT / "packs" / pack)["tool"]["shardcore"]["matrix"][library]
        assert lowest == next(release for release in releases if _is_served(pack, model, release)), (pack, model)
        assert f"{releases[-1]}.".startswith(f"{highest}."), (pack, releases)


def _is_served(pack: str, model: str, release: str) -> bool:
    """Return whether a pack's policies for a class accept this release of its library."""
    needs = [spec.requires for spec in _specs(pack) if spec.target.endswith(f".{model}")]
    assert needs, (pack, model)
    return any(need is None or Requirement(need).specifier.contains(release) for need in needs)


def _specs(pack: str) -> list[PolicySpec]:
    plugin = importlib.import_module(f"{pack.replace('-', '_')}.plugin")
    return plugin.shardcore_policies()


def _served(pack: str) -> set[str]:
    """Return the names of the classes that the plugin of a pack offers policies for."""
    return {spec.target.rpartition(".")[2] for spec in _specs(pack)}


def _named_in(cells: str) -> set[str]:
    """Return the classes that a table names; ``...ForX`` begins as the first one does."""
    names = re.findall(r"`([.\w]+)`", cells)
    family = re.match(r"(\w+?)(?:Model|For)", names[0])
    return {name.replace("...", family[1] if family else "") for name in names}


@pytest.mark.parametrize("pack", sorted(first_party()))
def test_the_classes_that_the_readme_names_are_served(pack):
    pytest.importorskip(f"{pack.replace('-', '_')}.plugin")
    rows = re.findall(rf"^\| `{pack}(?:\[\w+\])?` \| ([^|]*) \|", READMES[0].read_text(), re.M)
    named = set().union(*map(_named_in, rows))
    assert _served(pack) <= named
    # timm's distilled model is a subclass, which is found by itself.
    assert named - _served(pack) <= {"VisionTransformerDistilled"}
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
def test_what_a_readme_says_raises_is_not_what_its_policies_let_in(pack):
    sources = "".join(file.read_text() for file in (ROOT / "packs" / pack).glob("src/**/*.py"))
    let_in = set(re.findall(r'"(\w+)"', " ".join(re.findall(r"\bcalls\((.*?)\)", sources, re.S))))
    text = " ".join((ROOT / "packs" / pack / "README.md").read_text().split())
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
