"""`shardcore profile`: where the steps of a script go."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from torch import nn

from shardcore_loop.commands import profile
from shardcore_loop.profiling import Row, _parts, covered, table

SCRIPT = """
import sys
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.mlp(self.attention(x))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(4, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 2)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    print("step", step, flush=True)
"""
SHARDED = """
import torch
from tiny import TinyPolicy, batch, build
import shardcore

model = shardcore.shard(build(), tp=2, policy=TinyPolicy)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(batch()).sum().backward()
    optimizer.step()
"""


def profiled(folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Result:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    options = ["--skip", "2", "--steps", "2", "--out", str(folder / "found"), str(script), *arguments]
    return CliRunner().invoke(profile, options)


def test_a_table_and_a_profile(tmp_path, monkeypatch) -> None:
    result = profiled(tmp_path, monkeypatch, "9")
    assert result.exit_code == 0, result.output
    assert "step 3" in result.output
    assert "step 4" not in result.output  # it ends before the fifth
    lines = result.output.splitlines()
    found = {line[:48].strip(): line[48:].split() for line in lines if line.endswith("%")}
    assert found.keys() >= {"embed", "blocks.*.attention", "blocks.*.mlp", "head", "SGD.step", "collectives"}
    assert found["blocks.*.mlp"][0] == "2"
    assert found["head"][0] == "1"
    assert all(len(line) <= 80 for line in lines if str(tmp_path) not in line)
    trace = json.loads((tmp_path / "found" / "rank0.json").read_text())
    assert any(event.get("name") == "forward of blocks.*.mlp" for event in trace["traceEvents"])


def test_a_script_that_ends_with_its_steps(tmp_path, monkeypatch) -> None:
    result = profiled(tmp_path, monkeypatch, "4")
    assert result.exit_code == 0
    assert "SGD.step" in result.output


def test_a_script_that_ends_before(tmp_path, monkeypatch) -> None:
    result = profiled(tmp_path, monkeypatch, "3")
    assert result.exit_code == 1
    assert "ended after 3 steps; 2 + 2 were wanted: nothing was profiled" in result.output


def test_a_part_has_one_name_for_all_blocks() -> None:
    block = nn.Sequential()
    block.attention, block.norm = nn.Linear(2, 2), nn.LayerNorm(2)
    model = nn.Module()
    model.body = nn.Module()
    model.body.embed, model.body.layers = nn.Embedding(3, 2), nn.ModuleList([block])
    model.head = nn.Linear(2, 3)
    assert [name for _, name in _parts(model)] == [
        "body.embed",
        "body.layers.*.attention",
        "body.layers.*.norm",
        "head",
    ]


def test_what_overlaps_counts_once() -> None:
    assert covered([(0.0, 2.0), (1.0, 3.0), (5.0, 6.0), (5.2, 5.8)]) == 4.0
    assert table([Row("a" * 60, 2, 1.5)], 3.0)[1].split()[-3:] == ["2", "1.50", "50%"]


@pytest.mark.nightly
def test_ranks(tmp_path) -> None:
    (tmp_path / "train.py").write_text(SHARDED)
    support = Path(__file__).parents[3] / "shardcore" / "tests" / "support"
    path = os.pathsep.join(filter(None, (str(support), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "-m", "shardcore_cli", "profile", "--out", str(tmp_path / "found"), "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "found").iterdir()) == ["rank0.json", "rank1.json"]
    collectives = next(line for line in done.stdout.splitlines() if line.startswith("collectives"))
    assert float(collectives[48:].split()[1]) > 0.0
