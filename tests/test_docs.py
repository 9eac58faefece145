"""The documentation says everything that is public, and what it shows is true; needs no mkdocs."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import fnmatch
import importlib
import importlib.util
import io
import itertools
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement

import shardcore
import shardcore_shardformer as compat
from shardcore import hooks, nn, styles
from shardcore_cli import main
from shardcore_testing import Case, Supports

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: Pages for those who do not read docs/.
READMES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "shardcore/README.md")]
READMES += sorted(ROOT.glob("packs/*/README.md"))
#: Of distributions around the core.
AROUND = sorted(file for room in ("clients", "kit") for file in ROOT.glob(f"{room}/*/README.md"))

_LINK = re.compile(r"(?<!`)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(
    r"^(?:<!-- run: (?P<how>[\d ]+ ranks|by pytest) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S
)


def _site() -> types.ModuleType:
    """Load tools/_site.py, which puts text from the sources into the pages."""
    spec = importlib.util.spec_from_file_location("shardcore_docs_site", ROOT / "tools" / "_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _name(page: Path) -> str:
    return page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT).as_posix()


def _text(page: Path) -> str:
    return str(_site().expand(page.read_text(encoding="utf-8")))


def _everything() -> str:
    return "\n".join(map(_text, PAGES))


def _blocks(page: Path) -> list[tuple[str, str, set[int]]]:
    """Return (language, code, numbers of ranks to run it on) of each block of code."""
    found = _CODE.finditer(_text(page))
    return [(m["language"], m["code"], {int(n) for n in re.findall(r"\d+", m["how"] or "")}) for m in found]


def _tests(page: Path) -> list[str]:
    """Return the blocks of a page that are files of tests."""
    return [m["code"] for m in _CODE.finditer(_text(page)) if m["how"] == "by pytest"]


@pytest.mark.parametrize("described", [Case, Supports])
def test_the_tutorial_names_every_field_of_a_case(described):
    rows = re.findall(r"^\| (`[^|]*`) \|", (DOCS / "writing-a-pack.md").read_text(encoding="utf-8"), re.M)
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert {field.name for field in dataclasses.fields(described)} - named == set()


def test_every_public_name_is_in_the_reference():
    shown = set(re.findall(r"^::: shardcore\.(\w+)$", "\n".join(map(_text, (DOCS / "reference").glob("*.md"))), re.M))
    assert set(shardcore.__all__) - shown == set()


def test_every_parallel_module_and_alias_is_in_the_reference():
    page = (DOCS / "reference" / "modules.md").read_text(encoding="utf-8")
    elsewhere = set(shardcore.__all__)
    assert {n for n in nn.__all__ if n not in elsewhere and f"::: shardcore.nn.{n}\n" not in page} == set()
    aliases = {n for n in compat.__all__ if n != getattr(compat, n).__name__}
    names = {n: getattr(compat, n).__name__ for n in aliases}
    here = {*compat.__all__} - elsewhere
    rooms = {
        n: "shardcore" if name in elsewhere else "shardcore_shardformer" if name in here else "shardcore.nn"
        for n, name in names.items()
    }
    assert {
        n for n, room in rooms.items() if f"| `{n}` | `{room}.{getattr(compat, n).__name__}` |" not in page
    } == set()
    own = set(compat.__all__) - aliases - elsewhere
    page += (DOCS / "reference" / "engine.md").read_text(encoding="utf-8") + "\n"
    assert {n for n in own if f"::: shardcore_shardformer.{n}\n" not in page} == set()


@pytest.mark.parametrize("name", shardcore.__all__)
def test_every_public_name_has_a_docstring(name):
    value = getattr(shardcore, name)
    assert value.__doc__
    assert not (isinstance(value, type) and value.__doc__.startswith(f"{name}("))  # written by dataclass


def test_no_docstring_only_says_where_to_look():
    sources = [file for place in ("shardcore/src", "clients", "kit", "packs") for file in (ROOT / place).rglob("*.py")]
    texts = {file.relative_to(ROOT).as_posix(): file.read_text(encoding="utf-8") for file in sources}
    assert any('"""' in text for text in texts.values())
    assert {name for name, text in texts.items() if re.search(r'"""See `[\w.]+`\.?"""', text)} == set()


def test_every_hook_is_in_the_reference():
    declared = {name for name in hooks.__all__ if name.startswith("shardcore_")}
    assert declared == {name for name in vars(hooks) if name.startswith("shardcore_")}
    shown = (DOCS / "reference" / "hooks.md").read_text(encoding="utf-8")
    assert {name for name in declared if f"::: shardcore.hooks.{name}\n" not in shown} == set()


def test_every_word_is_in_the_docs():
    table = _text(DOCS / "packs.md")
    assert {word for word in styles.__all__ if f"| `{word}` | `{word}(" not in table} == set()


def test_every_environment_variable_is_in_the_docs():
    source = (Path(shardcore.__file__).parent / "_env.py").read_text(encoding="utf-8")
    constants = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    variables = {value for value in constants if isinstance(value, str) and re.fullmatch(r"[A-Z]+(_[A-Z]+)*", value)}
    assert {"SHARDCORE_PACKS", "SHARDCORE_STRICT", "RANK"} <= variables
    page = (DOCS / "environment.md").read_text(encoding="utf-8")
    assert {name for name in variables if f"`{name}`" not in page} == set()


def test_every_command_and_option_is_in_the_docs():
    text = (DOCS / "cli.md").read_text(encoding="utf-8")
    for name, command in main.commands.items():
        section = text.partition(f"\n## shardcore {name}\n")[2].partition("\n## ")[0]
        assert section, name
        options = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        assert {option for option in options if option not in section} == set(), name


def test_commands_that_the_docs_show_are_understood():
    plain = "".join(code for page in PAGES for language, code, _ in _blocks(page) if not language)
    shown = [line.partition("#")[0].split() for line in re.findall(r"^shardcore .*$", plain, re.M)]
    assert len(shown) > 5
    for _, command, *arguments in shown:
        known = {
            option for parameter in main.get_command(click.Context(main), command).params for option in parameter.opts
        }
        assert {word for word in arguments if word.startswith("--")} <= known, (command, arguments)


def _shown_plans() -> list[tuple[list[str], str]]:
    """Return each command of the page that reads plans, and what it shows of its output."""
    blocks = [(language, code) for language, code, _ in _blocks(DOCS / "plans.md")]
    pairs = itertools.pairwise(blocks)
    return [(line.split()[1:], text) for (kind, line), (language, text) in pairs if (kind, language) == ("", "text")]


def _rows(text: str) -> set[tuple[str, ...]]:
    """Return the lines of a plan, those of tables as their cells: what differs between two releases is left out."""
    text = re.sub(r"(digest|shard-llama) [\w.]+", r"\1", text)
    lines = [re.split(r"[│┃\t]", line) for line in text.splitlines() if not re.match("[┏┡└]", line)]
    return {tuple(cell.strip() for cell in line if cell.strip()) for line in lines}


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in (1, 2, 3))])
def test_the_plan_that_the_docs_show_is_the_plan(number, capsys, monkeypatch):
    pytest.importorskip("transformers")
    command, shown = _shown_plans()[number]
    wanted = _rows(shown)
    if command[0] == "explain":  # a terminal breaks its lines; the page does it by itself
        command.append("-v")
        wanted |= _rows(next(code for _, code, _ in _blocks(DOCS / "plans.md") if code.startswith("model.embed")))
    else:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        for name, value in {"COLUMNS": "80", "TERM": "xterm", "NO_COLOR": "1"}.items():
            monkeypatch.setenv(name, value)
    with contextlib.suppress(SystemExit):
        main(command)
    assert len(wanted) > 3
    assert wanted - _rows(re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)) == set()


def test_the_error_that_the_docs_show_is_the_error():
    pytest.importorskip("transformers")
    (shown,) = [code for language, code, _ in _blocks(DOCS / "errors.md") if language == "text"]
    result = CliRunner().invoke(main, ["explain", "LlamaForCausalLM", "--tp", "3"])
    assert shown.strip() in result.output


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_code_parses(page):
    for language, code, worlds in _blocks(page):
        assert language == "python" or not worlds
        if language == "python":
            ast.parse(code)


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=_name)
def test_links_lead_somewhere(page):
    for target in _LINK.findall(_text(page)):
        path, _, anchor = target.partition("#")
        if "://" in target:
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.is_file(), target
        if anchor and not re.match(r"shardcore(_\w+)?\.", anchor):
            assert anchor in {_anchor(line) for line in re.findall(r"^#+ (.*)$", _text(found), re.M)}, target
        elif anchor:
            assert f"::: {anchor}\n" in f"{_text(found)}\n", target


def _own() -> dict[str, tuple[str, set[str]]]:
    """Return the distributions of the workspace: folder -> its name, and the names of those that it requires."""
    found = {}
    for file in [ROOT / "shardcore" / "pyproject.toml", *ROOT.glob("*/*/pyproject.toml")]:
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
        needed = {Requirement(text).name for text in project.get("dependencies", ())}
        found[file.parent.relative_to(ROOT).as_posix()] = project["name"], needed
    names = {name for name, _ in found.values()}
    return {folder: (name, needed & names) for folder, (name, needed) in found.items()}


@pytest.mark.parametrize("page", [*PAGES, *READMES, *AROUND], ids=_name)
def test_lines_that_install_name_all_that_is_needed(page):
    """Nothing of the workspace need be in an index: pip would look there for what a line leaves out."""
    own = _own()
    for line in re.findall(r"pip install\s+(\./[^`#$\n]*(?:\n[^`#\n]*(?=`))?)", _text(page)):
        folders = [word.removeprefix("./") for part in line.split() if part.startswith("./") for word in _words(part)]
        named = {name for folder, (name, _) in own.items() if any(fnmatch.fnmatch(folder, of) for of in folders)}
        assert all(any(fnmatch.fnmatch(folder, of) for folder in own) for of in folders), line
        # What adds to an installation finds there what the first page installs.
        there = named if "shardcore" in named else {*named, "shardcore", "shardcore-transformers"}
        assert {of for name, needed in own.values() if name in named for of in needed} - there == set(), line


def _words(text: str) -> list[str]:
    """Return what a shell makes of a word with braces."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", text)
    return [text] if found is None else [f"{found[1]}{middle}{found[3]}" for middle in found[2].split(",")]


def _anchor(heading: str) -> str:
    """Return the anchor of a heading, as Markdown makes it."""
    return re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


#: What code of a page imports besides transformers and its own pack.
_NEEDS = {"trainer.md": "accelerate", "peft.md": "peft", "torch-modules.md": "shard_torch"}


#: Pages whose code is run, on each number of ranks that one of its blocks names. What `start.md` prints is compared.
#: Run by `test_the_losses_of_the_first_page_are_those_that_it_shows`, and by `tests/clients/test_pages.py`.
_ELSEWHERE = {"start.md", "trl.md", "sentence-transformers.md", "pipelines.md", "timm.md", "quantized.md"}
#: Dynamo makes an internal error of a warning that is an error, and torch warns of its own doings while it traces.
_MARKS = {
    "compile.md": (pytest.mark.filterwarnings("default"), pytest.mark.nightly),
    "your-model.md": pytest.mark.nightly,  # it infers a policy, as `test_first_drafts.py` does
}
_RUN = [
    (page, world)
    for page in (*PAGES, *READMES)
    for world in sorted(set().union(*(worlds for *_, worlds in _blocks(page))))
]


@pytest.mark.parametrize(
    ("page", "world"),
    [
        pytest.param(page, world, marks=_MARKS.get(_name(page), ()))
        for page, world in _RUN
        if _name(page) not in _ELSEWHERE
    ],
    ids=lambda value: _name(value) if isinstance(value, Path) else str(value),
)
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")  # the Trainer's, on a CPU
def test_code_runs(pool, page, world, tmp_path):
    pytest.importorskip("transformers")
    if needed := _NEEDS.get(_name(page)):
        pytest.importorskip(needed, reason=f"the page is of {needed}, which is not installed")
    if page.is_relative_to(ROOT / "packs"):
        pytest.importorskip(f"{page.parent.name.replace('-', '_')}.plugin")
    code = [code for _, code, worlds in _blocks(page) if world in worlds]
    pool.run(_run, code, str(tmp_path), world=world, timeout=100)


@pytest.mark.parametrize("page", [page for page in (*PAGES, *READMES) if _tests(page)], ids=_name)
def test_tests_that_are_shown_pass(pool, page, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    for number, code in enumerate(_tests(page)):
        name = f"shown_{_anchor(_name(page))}_{number}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
        module = importlib.import_module(name)
        shown = [value for name, value in vars(module).items() if name.startswith("test_")]
        assert shown
        for test in shown:
            test(pool)


def test_the_readme_begins_with_the_script_of_the_first_page():
    first = {}
    for page in (ROOT / "README.md", DOCS / "start.md"):
        blocks = _blocks(page)
        first[page] = [next(code for language, code, _ in blocks if language == kind) for kind in ("python", "text")]
    assert first[ROOT / "README.md"] == first[DOCS / "start.md"]


def test_the_losses_of_the_first_page_are_those_that_it_shows(pool, tmp_path):
    pytest.importorskip("transformers")
    page = DOCS / "start.md"
    (shown,) = [code for language, code, _ in _blocks(page) if language == "text"]
    wanted = [float(loss) for loss in re.findall(r"loss ([\d.]+)", shown)]
    assert len(wanted) == 10
    printed = {}
    for world in (1, 2):
        code = [code for _, code, worlds in _blocks(page) if world in worlds]
        (tmp_path / str(world)).mkdir()
        # On ranks that are already there; the first one says what all of them compute.
        text = pool.run(_printed, code, str(tmp_path / str(world)), world=world, timeout=100)[0]
        printed[world] = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", text, re.M)]
    assert printed[1] == pytest.approx(printed[2], abs=2e-4)
    assert printed[2] == pytest.approx(wanted, abs=2e-3)


#: Blocks of Python that `test_code_runs` leaves out: fragments, whose names are the reader's; files of a pack; and
#: those of `compat.md`, `extending.md` and `resume.md`, which tests beside the code of these pages run.
_SHOWN = {
    "compat.md": 7,
    "extending.md": 1,
    "packs.md": 2,
    "resume.md": 1,
}


@pytest.mark.parametrize("page", [page for page in (*PAGES, *READMES) if page.parent.name != "adr"], ids=_name)
def test_python_is_run(page):
    blocks = [worlds for language, _, worlds in _blocks(page) if language == "python"]
    scripts = re.findall(r"^\[examples/(\S+\.py)\]\(\S+\)$", page.read_text(encoding="utf-8"), re.M)
    assert sum(not worlds for worlds in blocks) == _SHOWN.get(_name(page), 0) + len(_tests(page)) + len(scripts)
    run = "".join(
        (ROOT / "tests" / "clients" / f"test_{name}.py").read_text() for name in ("examples", "launch", "evaluate")
    )
    assert [name for name in scripts if f'"{name}"' not in run and f'"examples/{name}"' not in run] == []


def _printed(blocks: list[str], folder: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        _run(blocks, folder)
    return out.getvalue()


def _run(blocks: list[str], folder: str) -> None:
    """Run the blocks of a page one after the other, as one program."""
    program: dict[str, Any] = {"__name__": "shardcore_docs"}
    with contextlib.chdir(folder):
        for number, block in enumerate(blocks, 1):
            try:
                exec(compile(block, f"block {number}", "exec"), program)
            except Exception as error:
                error.add_note(block)
                raise
