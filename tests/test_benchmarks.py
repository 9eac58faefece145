"""Whether what the benchmarks build by hand is what a plan would have built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_the_pair_enters_its_region_at_its_column_linear():
    command = [sys.executable, "-W", "ignore", "-c", _NODES, str(BENCHMARKS)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert "_EnteredLinearBackward" in run.stdout.split(), run.stdout + run.stderr
