"""The search for races on cards: that it runs is shown on CPUs, and that it says where bits differ."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import gpu  # from tools/
import gpu_streams  # from tools/
from gpu_ranks import draw  # from tools/
from gpu_streams import compare, first_difference  # from tools/


@pytest.mark.nightly
@pytest.mark.ranks
def test_random_steps_have_the_same_bits_twice(tmp_path, capsys):
    assert gpu.main(["streams", "--device", "cpu", "--steps", "9", "--results", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("cpu-streams: 1 passed, 0 failed, 1 skipped")
    one, other = (tmp_path / f"cpu-streams-{name}.jsonl" for name in ("as-it-is", "blocking"))
    lines = [json.loads(line) for line in one.read_text().splitlines()]
    assert {(line["model"], line["step"]) for line in lines} == {(0, step) for step in range(8)} | {(1, 0)}
    assert all(any(line["gradients"].values()) for line in lines)
    assert len({line["loss"] for line in lines}) >= 9  # of steps and replicas
    # One bit of one gradient.
    name = "model.layers.0.self_attn.q_proj.weight"
    lines[3]["gradients"][name] += 1
    other.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    place = ", ".join(f"{key} {lines[3][key]}" for key in ("model", "step", "rank"))
    assert first_difference(one, other).startswith(f"{place}: the gradient of {name}; Drawn(")


@pytest.mark.nightly
def test_a_run_that_fails_says_why(tmp_path):
    found = compare("nothing", 1, tmp_path, ranks=2)
    assert found.passed == []
    assert "there is no nothing device here" in found.failures["the run as it is"]


@pytest.mark.parametrize(
    ("said", "status", "outcome"),
    [
        ("ERROR SUMMARY: 0 errors", 0, "passed"),
        ("ERROR SUMMARY: 3 errors", 99, "failures"),
        ("Unable to find the driver", 1, "skipped"),
    ],
)
def test_the_verdict_of_the_sanitizer_is_told(tmp_path, monkeypatch, said, status, outcome):
    tool = tmp_path / "compute-sanitizer"
    tool.write_text(f"#!/bin/sh\necho '========= {said}'\nexit {status}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    verdict = gpu_streams.Verdict()
    gpu_streams._sanitize(verdict, "cuda", tmp_path, time.monotonic() + 30)
    found = {"passed": verdict.passed, "failures": [*verdict.failures.values()], "skipped": verdict.skipped}
    assert {name: len(lines) for name, lines in found.items() if lines} == {outcome: 1}
    assert said in found[outcome][0]


def test_what_is_drawn_has_all_of_it():
    drawn = [draw(seed, 8, 4) for seed in range(25)]
    assert {d.replicas for d in drawn} == {1, 2}
    assert {d.dtype for d in drawn} == {"float32", "bfloat16"}
    assert {d.fields.get("sequence_keep_gathered") for d in drawn} == {None, False, True}
    assert {d.replicas for d in (draw(seed, 8, 2) for seed in range(25))} == {1}
