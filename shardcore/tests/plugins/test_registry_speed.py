"""What everybody pays for discovery. The smallest of ten runs counts: a busy machine only adds.

A run's time is that of the processor, which a single thread spends alone; waiting for a busy one is not counted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from given_packs import VARIABLES, install, serves

import shardcore

RUNS = 10
PACKS = 20


def python(*arguments, path=()):
    """Run a fresh interpreter and return (seconds of the processor, its output, what it wrote to stderr)."""
    source = Path(shardcore.__file__).parents[1]
    # What is imported is compiled once, as by any installer.
    unset = (*VARIABLES, "PYTHONDONTWRITEBYTECODE")
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, filter(None, (*path, source, os.environ.get("PYTHONPATH")))))
    before = os.times()
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environ)
    after = os.times()
    seconds = after.children_user - before.children_user + after.children_system - before.children_system
    assert done.returncode == 0, done.stderr
    return seconds, done.stdout, done.stderr


def imported():
    """Return the milliseconds of the processor that `import shardcore.hooks` takes with all that it imports."""
    _, said, _ = python(
        "-c", "import time; before = time.process_time(); import shardcore.hooks; print(time.process_time() - before)"
    )
    return 1000 * float(said)


def test_hooks_are_imported_in_50_milliseconds():
    assert min(imported() for _ in range(RUNS)) < 50


@pytest.mark.nightly
def test_twenty_packs_are_listed_in_300_milliseconds(tmp_path):
    for number in range(PACKS):
        requires = ["torch>=2", 'torch>=2,<99; extra == "tested"']
        install(tmp_path, f"p{number}", serves(f"shard_p{number}", f"models.M{number}"), requires=requires)
    command = ("-c", "from shardcore_cli import main; main(['packs'])")
    runs = [python(*command, path=[tmp_path]) for _ in range(RUNS)]
    lines = runs[0][1].splitlines()
    assert sum(line.startswith("p") and "\tloaded\t" in line and "torch >=2,<99 (" in line for line in lines) == PACKS
    assert min(seconds for seconds, _, _ in runs) < 0.3
