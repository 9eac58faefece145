"""A test over its limit fails alone, with the stacks of its ranks, and the next one runs."""

from __future__ import annotations

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import shardcore_testing.pool
from shardcore_testing import processes
from shardcore_testing.pool import WorkerPool
from shardcore_testing.processes import slowness

pytestmark = pytest.mark.nightly

TESTS = """
import threading
import time

import pytest
import torch.distributed as dist

def wait_for_ever():
    if dist.get_rank() == 1:
        threading.Event().wait()

def loop_for_ever():
    while True:
        time.sleep(0.1)

def test_hangs_in_a_rank(pool):
    pool.run(wait_for_ever, timeout=2)

def test_starts_ranks_anew(pool):
    assert pool.run(dist.get_rank) == [0, 1]

@pytest.mark.timeout(5)
def test_waits_for_a_rank_that_hangs(pool):
    pool.run(loop_for_ever, timeout=100)

@pytest.mark.timeout(1)
def test_hangs_itself():
    loop_for_ever()

def test_next(pool):
    assert pool.run(dist.get_rank) == [0, 1]
"""


def test_a_test_over_its_limit_fails_alone(tmp_path):
    (tmp_path / "test_hangs.py").write_text(TESTS)
    report = tmp_path / "report.xml"
    # The settings of this workspace, for another folder.
    settings = ["-c", str(Path(__file__).parents[3] / "pyproject.toml"), f"--rootdir={tmp_path}"]
    command = [sys.executable, "-m", "pytest", "-q", *settings, f"--junitxml={report}", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 1, done.stdout
    found = {case.get("name"): case.find("failure") for case in ElementTree.parse(report).iter("testcase")}
    assert [name for name, failure in found.items() if failure is None] == ["test_starts_ranks_anew", "test_next"], (
        done.stdout
    )
    said = {name: failure.text for name, failure in found.items() if failure is not None}
    assert "in wait_for_ever" in said["test_hangs_in_a_rank"]
    assert "Timeout" in said["test_waits_for_a_rank_that_hangs"]
    assert said["test_waits_for_a_rank_that_hangs"].count("in loop_for_ever") == 2  # on both ranks
    assert "loop_for_ever" in said["test_hangs_itself"]


@pytest.mark.parametrize(("load", "factor"), [(0.5, 1.0), (4.0, 2.0), (50.0, 4.0)])
def test_limits_grow_with_the_load(monkeypatch, load, factor):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1}, raising=False)
    assert slowness() == factor


def test_a_system_that_says_nothing_about_its_load(monkeypatch):
    def unknown():
        raise OSError

    monkeypatch.setattr(os, "getloadavg", unknown)
    assert slowness() == 1.0


def test_the_limit_of_a_call_grows(pool, monkeypatch):
    asked = []
    monkeypatch.setattr(shardcore_testing.pool, "slowness", lambda: 3.0)
    monkeypatch.setattr(pool, "_ask", lambda tasks, limit: asked.append(limit) or ({}, []))
    with pytest.raises(shardcore_testing.WorkerTimeout, match="within 6 s"):
        pool.run(os.getpid, world=1, timeout=2.0, process_group=False)
    assert asked[-1] == 6.0


def test_the_limit_of_a_start_grows(monkeypatch):
    monkeypatch.setattr(processes, "slowness", lambda: 3.0)
    monkeypatch.setattr(processes, "_START_LIMIT", 1e-3)
    with WorkerPool(1) as workers, pytest.raises(shardcore_testing.WorkerTimeout, match=r"not start within 0\.003 s"):
        workers.run(os.getpid, world=1, process_group=False)
