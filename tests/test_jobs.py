"""What the jobs of the workspace run, and what they end with; needs no nox."""

from __future__ import annotations

import ast
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Instead of Python with nox: writes down how it was called, leaves totals, and ends with a status.
STUB = """#!/bin/sh
echo "$@" >> calls
case "$*" in
  "-m nox"*) mkdir -p .nox/results; echo "{totals}" > .nox/results/totals; printf "{last}"; exit {status};;
esac
"""


def sessions() -> dict[str, dict[str, ast.expr]]:
    """Return name -> the keywords of ``nox.session`` of every session that is a function at the top level."""
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return {
        node.name: {keyword.arg or "": keyword.value for keyword in decorator.keywords}
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        for decorator in node.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "nox.session"
    }


def tagged(tag: str) -> set[str]:
    found = {name: ast.literal_eval(keywords.get("tags", ast.List([]))) for name, keywords in sessions().items()}
    return {name for name, tags in found.items() if tag in tags}


def run_ci(folder, **stub_fields):
    """Run the command of CI in a ``folder`` that has nothing else, with the stub for Python."""
    (folder / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci" / "run")
    stub = folder / "bin" / "python"
    stub.parent.mkdir()
    stub.write_text(STUB.format(**stub_fields))
    stub.chmod(stub.stat().st_mode | stat.S_IXUSR)
    env = {**os.environ, "PATH": f"{stub.parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run([folder / ".ci" / "run"], env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("status", [0, 1])
def test_the_command_of_ci_runs_tests_and_checks_and_ends_with_the_totals(tmp_path, status):
    done = run_ci(tmp_path, status=status, totals="7 passed, 1 failed", last="summary\\n")
    assert done.returncode == status
    assert done.stdout.splitlines()[-2:] == ["summary", "7 passed, 1 failed"]
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "-m nox -s quick"
    assert tagged("quick") >= {"newcomer", "oldest"}
    assert tagged("checks") == {"lint", "types", "docs"}
    assert tagged("tests") >= {"core", "together"}


@pytest.mark.parametrize(
    ("status", "closing"), [(0, "7 passed, 0 failed, 2 skipped"), (3, "7 passed, 1 failed, 2 skipped")]
)
def test_a_run_that_was_cut_off_has_failed(tmp_path, status, closing):
    done = run_ci(
        tmp_path, status=status, totals="7 passed, 0 failed, 2 skipped", last="a line\\n" if not status else "a l"
    )
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == closing
    assert ("before all of its sessions" in done.stdout) == bool(status)


def test_nox_alone_is_what_is_needed_before_a_commit():
    tree = ast.parse((ROOT / "noxfile.py").read_text(encoding="utf-8"))
    options = {
        ast.unparse(target).removeprefix("nox.options."): ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if ast.unparse(target).startswith("nox.options.")
    }
    # Tags would be a second condition, which no session fulfils.
    assert "tags" not in options
    assert set(options["sessions"]) == {*tagged("checks"), "smoke"} <= sessions().keys()


def test_a_test_of_the_quick_run_that_takes_long_says_why(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n")
    (tmp_path / "conftest.py").write_text("import quick\nquick.LIMIT = 0.1\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest, time\n"
        "@pytest.fixture\ndef made(): time.sleep(0.6)\n"
        "def test_short(made): pass\n"
        "def test_long(): time.sleep(0.6)\n"
        "def test_that_fails():\n    time.sleep(0.6)\n    raise ZeroDivisionError\n"
        "@pytest.mark.slow('it waits')\ndef test_that_may(): time.sleep(0.6)\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "quick", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "it took 1 s, and the limit of the quick run is 0: make it quicker" in done.stdout
    assert "ZeroDivisionError" in done.stdout


def test_tests_that_need_ranks_are_left_out_or_run_alone(tmp_path):
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    ranks\n")
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "@pytest.fixture\ndef pool(): raise ZeroDivisionError\n"
        "@pytest.fixture\ndef model(pool): return 1\n"
        "def test_alone(): pass\n"
        "def test_direct(pool): pass\n"
        "def test_through_another(model): pass\n"
        "@pytest.mark.ranks\ndef test_with_processes_of_its_own(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "without_ranks", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}

    def run(*options: str) -> str:
        done = subprocess.run(
            [*command, *options], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.splitlines()[-1]

    assert run("--without-ranks").startswith("1 passed, 3 deselected")
    assert run("--on-ranks").startswith("1 passed, 1 deselected, 2 errors")
    assert run().startswith("2 passed, 2 errors")
