"""Sessions that run at the same time: all of them once, in environments of their own, with what each printed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tools"))

from lanes import lanes_here, run, sessions_of  # noqa: E402  # from tools/

# Instead of nox: lists sessions; runs one, which says where it is, waits for another one, and fails if it is told to.
STUB = """
import json, os, sys, time
from pathlib import Path
if "--list" in sys.argv:
    assert sys.argv[-3:] == ["--tags", "tests", "checks"]
    tags = {"lint": ["checks"], "core": ["tests", "long"], "one": ["tests"], "together": ["tests", "long"]}
    print(json.dumps([{"session": name, "tags": found} for name, found in tags.items()]))
    sys.exit()
name = sys.argv[sys.argv.index("--session") + 1]
Path(f"{name}.started").write_text(os.environ["SHARDCORE_LANE"])
print(f"first line of {name}", flush=True)
deadline = time.monotonic() + 30
while name.startswith("waits") and len(list(Path().glob("waits*.started"))) < 2 and time.monotonic() < deadline:
    time.sleep(0.01)
while name == "hangs":
    time.sleep(0.01)
print(f"last line of {name}")
sys.exit(3 if name.startswith("fails") or time.monotonic() > deadline else 0)
"""


@pytest.fixture
def nox(tmp_path):
    (tmp_path / "stub.py").write_text(STUB)
    return [sys.executable, "stub.py"]


def test_long_sessions_come_first(tmp_path, nox):
    assert sessions_of(tmp_path, ["tests", "checks"], nox) == ["core", "together", "lint", "one"]


def test_each_runs_once_and_what_it_prints_stays_together(tmp_path, nox):
    said: list[str] = []
    names = ["waits-1", "waits-2", "fails-1", "good", "fails-2"]
    assert run(tmp_path, names, nox, lanes=2, say=said.append) == ["fails-1", "fails-2"]
    assert {file.stem for file in tmp_path.glob("*.started")} == set(names)
    # These two waited for each other.
    assert {(tmp_path / f"waits-{i}.started").read_text() for i in (1, 2)} == {"0", "1"}
    blocks = [text for text in said if text.startswith("first line")]
    assert len(blocks) == len(names)
    for text in blocks:
        name = text.splitlines()[0].rpartition(" ")[2]
        assert text.splitlines()[1] == f"last line of {name}"
        assert f"{name}: {'failed' if name.startswith('fails') else 'ended'} after" in text
    assert "5 of 5" in blocks[-1]


def test_what_is_interrupted_leaves_no_process(tmp_path, nox):
    script = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); from pathlib import Path; import lanes\n"
        f"lanes.run(Path({str(tmp_path)!r}), ['hangs', 'never'], {nox!r}, lanes=1, say=print)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
    started = tmp_path / "hangs.started"
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert not (tmp_path / "never.started").exists()


def test_there_is_a_lane_for_each_core(monkeypatch):
    assert 1 <= lanes_here() <= 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    assert lanes_here() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)
    assert lanes_here() == 1
