"""Whether what the benchmarks build by hand is what they compare, and what they count is what is sent."""

from __future__ import annotations

import json
import re
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


def _gpu(found: Path, *options: str) -> dict:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / "gpu.py"), "--cpu", "--layers", "1", "--rounds", "1"]
    run = subprocess.run(
        [*command, "--json", str(found), *options], capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(found.read_text())


@pytest.mark.nightly
def test_the_main_part_of_the_table_for_a_card_has_no_system_that_fails(tmp_path):
    found = _gpu(tmp_path / "found.json")
    assert {"device", "torch", "transformers"} <= found.keys()
    assert [row for row in found["rows"] if row["error"]] == []
    assert all(row["least"] > 0 for row in found["rows"])
    measured = {(row["model"], row["system"]) for row in found["rows"]}
    assert len({model for model, _ in measured}) == 6
    assert len({system for model, system in measured if model == "llama-8b"}) == 10
    kinds = {row["what"].split()[0].rstrip(",") for row in found["rows"]}
    assert kinds == {"training", "prefill", "decoding", "AdamW"}


@pytest.mark.nightly
def test_a_system_that_raises_has_a_row_that_says_why(tmp_path):
    options = ("--part", "all", "--models", "whisper-large", "--tp", "8", "--tokens", "4", "--systems", "shardcore")
    rows = _gpu(tmp_path / "found.json", *options)["rows"]
    assert [row["error"].split(":")[0] for row in rows] == ["PlanError"]  # 20 heads, 8 ranks
    rows = _gpu(tmp_path / "found.json", *options, "--limit", "1e-9")["rows"]
    assert [row["error"].split(":")[0] for row in rows] == ["not begun"]


@pytest.mark.nightly
def test_a_slow_link_is_waited_for():
    command = [sys.executable, "-W", "ignore", "overlap.py", "--hidden", "64", "--rows", "2", "--tokens", "64"]
    run = subprocess.run(command, cwd=BENCHMARKS, capture_output=True, text=True, timeout=120, check=False)
    rows = dict(re.findall(r"│ ([a-z ,]+?) +│ +(\d+) +│", run.stdout))
    assert int(rows["waited for"]) > int(rows["no link"]), run.stdout + run.stderr


_SIZES = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from gpu_models import FAMILIES, SYSTEMS, blocks_of, model_of
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
for name, family in FAMILIES.items():
    sizes = []
    for system in ("ideal", "shardcore"):
        model = model_of(family, SYSTEMS[system], 1, "cpu", tiny=True, dtype=torch.float32)
        parameters = [p for block in blocks_of(model, family) for p in block.parameters()]
        sizes.append([getattr(p, "to_local", lambda p=p: p)().shape for p in parameters])
    print("BLOCKS", name, sizes[0] == sizes[1])
"""


@pytest.mark.nightly
def test_what_is_ideal_has_the_sizes_of_a_rank():
    command = [sys.executable, "-W", "ignore", "-c", _SIZES, str(BENCHMARKS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    said = [line.split()[1:] for line in run.stdout.splitlines() if line.startswith("BLOCKS")]
    assert len(said) == 6, run.stdout + run.stderr
    assert [name for name, same in said if same != "True"] == []
