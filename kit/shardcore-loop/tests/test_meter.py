"""What a StepMeter says of a training."""

from __future__ import annotations

import re
import time

import pytest
import torch
from tiny import TinyPolicy, batch, build
from torch import nn

import shardcore
from shardcore.errors import ConfigError
from shardcore_loop import StepMeter

# What torch 2.11 says once of any profile.
pytestmark = pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")

LINE = re.compile(
    r"step (?P<step>\d+): [\d.]+ ms, (?P<rate>[\d,]+) tokens/s, MFU (?P<mfu>\d+) %, collectives (?P<shared>\d+) %, "
    r"memory (?P<memory>[\d.]+)( to [\d.]+)? GiB"
)


def test_a_line_every_few_steps() -> None:
    model, lines = nn.Linear(64, 32, bias=False), []
    meter = StepMeter(model, every=3, peak=1e6, say=lines.append)
    x = torch.randn(8, 64)
    for _ in range(9):
        with meter.step(tokens=8):
            model(x).sum().backward()
            time.sleep(0.01)
    assert [LINE.fullmatch(line)["step"] for line in lines] == ["6", "9"]
    seconds = meter.numbers["step_time"]
    assert 0.01 < seconds < 1.0
    assert meter.numbers["tokens_per_second"] == pytest.approx(8 / seconds)
    assert meter.numbers["mfu"] == pytest.approx(3 * 2 * 8 * 64 * 32 / (seconds * 1e6))
    assert meter.numbers["collectives"] == 0.0
    assert meter.numbers["memory"] > 2**20


def test_what_is_not_known_is_not_said() -> None:
    model, lines = nn.Linear(4, 4), []
    meter = StepMeter(model, every=4, say=lines.append)
    for _ in range(4):
        with meter.step():
            model(torch.randn(2, 4))
    assert re.fullmatch(r"step 4: [\d.]+ ms, collectives 0 %, memory [\d.]+ GiB", lines[0])
    assert meter.numbers.keys() == {"step_time", "collectives", "memory"}


def test_a_step_that_fails_is_no_step() -> None:
    model, lines = nn.Linear(4, 4), []
    meter = StepMeter(model, every=1, say=lines.append)
    for _ in range(4):
        with meter.step():
            model(torch.randn(2, 4))
        with pytest.raises(ZeroDivisionError), meter.step():
            raise ZeroDivisionError
    assert [line.partition(":")[0] for line in lines] == ["step 4"]


def test_a_line_needs_steps() -> None:
    with pytest.raises(ConfigError, match=r"StepMeter\(every=0\); wanted a number of steps"):
        StepMeter(nn.Linear(2, 2), every=0)


def _metered() -> tuple[list[str], dict[str, float]]:
    lines: list[str] = []
    model = shardcore.shard(build(), tp=2, policy=TinyPolicy)
    meter = StepMeter(model, every=2, peak=1e9, say=lines.append)
    for _ in range(6):
        with meter.step(tokens=10):
            model(batch()).sum().backward()
    return lines, meter.numbers


def test_ranks_of_a_sharded_model(pool) -> None:
    (lines, numbers), (others, same) = pool.run(_metered, world=2)
    assert [LINE.fullmatch(line)["step"] for line in lines] == ["4", "6"]
    assert others == []
    assert numbers["collectives"] > 0.0
    assert numbers["mfu"] > 0.0
    assert numbers["memory"] == same["memory"]
