"""Whether what the benchmarks build by hand is what they compare, and what they count is what is sent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"

_NODES = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import pairs
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
waiting = [pairs._shardcore()(torch.randn(2, 4, 16, requires_grad=True)).grad_fn]
while waiting:
    node = waiting.pop()
    print(type(node).__name__)
    waiting += [further for further, _ in node.next_functions if further is not None]
"""


@pytest.mark.nightly
def test_the_pair_enters_its_region_at_its_column_linear():
    command = [sys.executable, "-W", "ignore", "-c", _NODES, str(BENCHMARKS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "_EnteredLinearBackward" in run.stdout.split(), run.stdout + run.stderr


@pytest.mark.nightly
def test_a_pipeline_by_hand_computes_and_sends_what_shardcore_does(tmp_path):
    script, found = BENCHMARKS / "pipeline.py", tmp_path / "found.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(script),
        "--size",
        "host-bound",
        "--rounds",
        "1",
        "--json",
        str(found),
    ]
    schedules = {"1f1b": 1, "interleaved_zero_bubble": 3}  # and how many boundaries they have
    command += [word for schedule in schedules for word in ("--schedule", schedule)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr  # it refuses other gradients
    ranks = json.loads(found.read_text())["ranks"]
    for schedule, boundaries in schedules.items():
        for system in ("shardcore", "by hand", "by hand, bare layers"):
            of = [rank[f"{schedule}: {system}"] for rank in ranks]
            assert of[0]["sends"] + of[1]["sends"] == 2 * 8 * boundaries * [1 * 16 * 64 * 4]
            assert [rank["collectives"] for rank in of] == [3 if system == "shardcore" else 0] * 2
