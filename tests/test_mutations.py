"""The runner of recorded mistakes, on a workspace of two functions; and the form of what is recorded."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

import mutations  # noqa: E402  # from tools/
from mistakes import DoesNotApplyError, load  # noqa: E402  # from tools/
from mutations import main, try_all  # noqa: E402

RECORD = """
[[mutation]]
name = "{name}"
mistake = "in words"
test = "{test}"
edits = [{{ find = '''{find}''', replace = '''{replace}''' }}]
"""


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.setattr(mutations, "WARM", ())
    package = tmp_path / "shardcore" / "src" / "halves"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("def half(x):\n    return x / 2\n\n\ndef third(x):\n    return x / 3\n")
    (tmp_path / "test_halves.py").write_text(
        "import time\nimport pytest\nfrom halves import half, third\n"
        "def test_half(): assert half(4) == 2\n"
        "def test_weak(): assert half(0) == 0\n"
        "def test_red(): assert False\n"
        "def test_skipped(): pytest.skip()\n"
        "def test_ends():\n    while half(4) != 2: time.sleep(0.1)\n"
    )
    (tmp_path / "tests" / "mutations").mkdir(parents=True)
    return tmp_path


def record(workspace: Path, *records: dict[str, str]) -> None:
    default = {"name": "one", "test": "test_halves.py::test_half", "find": "x / 2", "replace": "x / 3"}
    text = "".join(RECORD.format(**{**default, **values}) for values in records)
    (workspace / "tests" / "mutations" / "some.toml").write_text(text)


def results(workspace: Path, limit: float = 60.0) -> dict[str, str]:
    recorded = load(workspace / "tests" / "mutations")
    return {outcome.mutation.name: outcome.result for outcome in try_all(recorded, workspace, limit=limit, jobs=2)}


def test_what_becomes_of_a_mistake(workspace):
    record(
        workspace,
        {"name": "seen"},
        {"name": "not seen", "test": "test_halves.py::test_weak"},
        {"name": "gone", "find": "x / 4"},
        {"name": "twice", "find": "return x"},
        {"name": "red before", "test": "test_halves.py::test_red"},
        {"name": "skipped", "test": "test_halves.py::test_skipped"},
        {"name": "no such test", "test": "test_halves.py::test_that_is_gone"},
        {"name": "no python", "replace": "x /"},
        {"name": "seen again"},
    )
    before = (workspace / "shardcore/src/halves/__init__.py").read_text()
    assert results(workspace) == {
        "seen": "noticed",
        "not seen": "unnoticed",
        "gone": "does not apply",
        "twice": "does not apply",
        "red before": "no test",
        "skipped": "no test",
        "no such test": "no test",
        "no python": "no test",
        "seen again": "noticed",
    }
    assert (workspace / "shardcore/src/halves/__init__.py").read_text() == before


def test_an_edit_that_takes_the_text_of_the_next_one(workspace):
    record(workspace, {})
    file = workspace / "tests" / "mutations" / "some.toml"
    one = "{ find = '''x / 2''', replace = '''x / 3''' }"
    file.write_text(file.read_text().replace(one, f"{one}, {one}"))
    assert results(workspace) == {"one": "does not apply"}


@pytest.mark.nightly
def test_a_test_that_does_not_end_is_stopped(workspace):
    record(workspace, {"test": "test_halves.py::test_ends"})
    assert results(workspace, limit=6.0) == {"one": "no end"}


def test_a_termination_ends_the_runs_and_removes_the_copies(workspace, tmp_path_factory):
    record(workspace, {"test": "test_halves.py::test_ends"})
    copies = tmp_path_factory.mktemp("copies")
    command = f"mutations.WARM = (); sys.exit(mutations.main([], mutations.Path({str(workspace)!r})))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools"), "TMPDIR": str(copies)}
    with subprocess.Popen(
        [sys.executable, "-c", f"import sys, mutations; {command}"], env=env, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline().startswith("without mistake  1 of 1")
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM
        assert process.stdout.read() == ""  # at its end: nobody holds it
    assert list(copies.iterdir()) == []


def test_the_command_fails_unless_everything_is_noticed(workspace, capsys):
    record(workspace, {"name": "seen"}, {"name": "gone", "find": "x / 4"})
    assert main(["--only", "seen"], workspace) == 0
    assert re.search(r"^\[1/1\] noticed .*\n1 of 1 noticed in 0\.\d min\n$", capsys.readouterr().out, re.M | re.S)
    assert main([], workspace) == 1
    assert "found nowhere: 'x / 4'" in capsys.readouterr().out
    assert main(["--check", "--only", "seen"], workspace) == 0
    assert main(["--check"], workspace) == 1
    assert main(["--list"], workspace) == 0
    assert "gone\n    in words\n    test_halves.py::test_half" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no mutation is named other"):
        main(["--only", "other"], workspace)


def test_records_that_are_wrong(workspace):
    record(workspace, {"name": "one"}, {"name": "one"})
    with pytest.raises(ValueError, match="used twice: one"):
        load(workspace / "tests" / "mutations")
    record(workspace, {"replace": "x / 2"})
    with pytest.raises(ValueError, match="changes something"):
        load(workspace / "tests" / "mutations")


def test_what_is_recorded_names_tests_that_exist():
    recorded = load(ROOT / "tests" / "mutations")
    assert len(recorded) >= 30
    for mutation in recorded:
        path, *names = mutation.test.split("::")
        text = (ROOT / path).read_text(encoding="utf-8")
        generated = "PolicyConformance" in text
        for name in names:
            bare = re.sub(r"\[.*", "", name)
            assert generated or re.search(rf"^ *(?:def|class) {bare}\b", text, re.M), mutation.test


def test_what_is_recorded_applies_and_leaves_python():
    """An edit that breaks the syntax would be noticed by every test."""
    stale = []
    for mutation in load(ROOT / "tests" / "mutations"):
        texts: dict[Path, str] = {}
        for edit in mutation.edits:
            try:
                file = edit.place(ROOT)
            except DoesNotApplyError as error:
                stale.append(f"{mutation.name}: {error}")
                continue
            texts[file] = texts.get(file, file.read_text(encoding="utf-8")).replace(edit.find, edit.replace)
        for file, text in texts.items():
            if file.suffix == ".py":
                compile(text, f"{mutation.name}: {file}", "exec")
    assert not stale
