"""Commands come from distributions: a third party's is found, a broken one hurts nobody, a missing one is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from given_packs import install_entries

from shardcore_cli import app, main

MODEL = """
from torch import nn

class Small(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)
"""
PAGE = Path(__file__).parents[3] / "docs" / "extending.md"


def run(*arguments: str):
    return CliRunner().invoke(main, arguments)


def test_the_command_that_the_page_shows(target):
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    install_entries(
        target, "their-tools", app.GROUP, {"count": "their_tools:count"}, {"their_tools": source, "their_model": MODEL}
    )
    assert run("count", "their_model.Small").output == "8\n"
    assert "Count the parameters of a model." in run("--help").output


@pytest.mark.parametrize(
    ("name", "source", "why"),
    [
        ("ends", "raise SystemExit(3)", "exit code 3"),
        ("lacks", "import not_there_at_all", "No module named 'not_there_at_all'"),
        ("counts", "count = 3", "int; wanted a command of click"),
    ],
)
def test_a_broken_command_says_why_and_hurts_no_other(target, name, source, why):
    install_entries(target, "their-tools", app.GROUP, {"count": f"{name}:count"}, {name: source})
    done = run("count", "Llama", "--deep")
    assert done.exit_code == 1
    assert "'count' of their-tools cannot be loaded: " in done.output
    assert why in done.output
    assert run("packs").exit_code == 0
    assert "Broken: " in run("--help").output


def test_a_command_of_this_project_that_is_not_installed_is_named_with_its_line(monkeypatch):
    monkeypatch.setattr(app, "_offered", dict)
    done = run("plan", "LlamaForCausalLM")
    assert done.exit_code == 2
    assert "'plan' is a command of shardcore-planner, which is not installed" in done.output
    assert "Did you mean" not in done.output
    assert "pip install" in done.output
    assert "No such command 'plam'. Did you mean 'plan'?" in run("plam").output
