"""Sessions run side by side unless they share an environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from lanes import group, run  # noqa: E402  # from tools/

# Writes down when it began and when it ended; fails if it is told to.
CALL = """
import json, sys, time
folder, *names = sys.argv[1:]
begin = time.time()
print("started", *names, flush=True)
time.sleep(0.5)
open(f"{folder}/{names[0]}", "w").write(json.dumps([begin, time.time()]))
sys.exit("bad" in names)
"""


def test_those_that_share_an_environment_follow_each_other():
    environments = {"lint": "newest", "a-5": "newest", "a-4": "oldest", "b-5": "newest", "core": "core"}
    sessions = ["lint", "core", "a-5", "b-5", "a-4", "alone"]
    assert group(sessions, environments) == [["lint", "a-5", "b-5"], ["core"], ["a-4"], ["alone"]]


def test_two_at_a_time(tmp_path):
    lines: list[str] = []
    groups = [["one", "more"], ["bad"], ["three"], ["four"]]
    failed = run(groups, [sys.executable, "-c", CALL, str(tmp_path)], lanes=2, write=lines.append)
    assert failed == ["bad"]
    assert sorted(lines) == ["1| started one more\n", "2| started bad\n", "3| started three\n", "4| started four\n"]
    spans = sorted(json.loads((tmp_path / names[0]).read_text()) for names in groups)
    most = max(sum(begin <= moment < end for begin, end in spans) for moment, _ in spans)
    assert most == 2


@pytest.mark.nightly
@pytest.mark.skipif(os.name == "nt", reason="signals of POSIX")
def test_an_interruption_ends_what_runs_and_starts_nothing_more(tmp_path):
    # Where tests run in the background, signals of the keyboard are ignored, in what they start too.
    code = "import signal, lanes; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "lanes.run([['61'], ['62'], ['63']], ['sleep'], lanes=2)"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stderr=subprocess.DEVNULL)
    time.sleep(5)
    begin = time.monotonic()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert time.monotonic() - begin < 20
