"""The examples to start from: a fine-tuning that is killed goes on as if nothing had happened."""

from __future__ import annotations

import json
import math
import random
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "examples")]

import resume  # noqa: E402  # from tools/
from _settings import read  # noqa: E402  # from examples/

STEPS = 8


@pytest.mark.nightly
def test_a_training_is_killed_and_goes_on_on_another_mesh(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = resume.pretrained(tmp_path / "pretrained", steps=2)
    options = ("--dropout", "0.0", "--precision", "float64", "--batch", "8", "--micro-batch", "2", "--length", "24")
    wanted = resume.uninterrupted(resume.Training(model, tmp_path / "whole", STEPS, options), tp=2)
    training = resume.Training(model, tmp_path / "killed", STEPS, options)
    found = resume.interrupted(training, (2, 1), random.Random(0), kills=1)
    assert resume.compare(found, wanted, resume.BOUND) <= resume.BOUND
    assert re.findall("SIGTERM|SIGKILL", capsys.readouterr().out) == ["SIGTERM", "SIGKILL"]
    printed = (tmp_path / "killed" / "printed").read_text()
    assert "because of SIGTERM; start again to go on" in printed
    begun = re.findall(r"(\d) replicas x tp (\d), from step (\d+)", printed)
    assert [start[:2] for start in begun] == [("1", "2"), ("2", "1"), ("2", "1")]
    assert int(begun[0][2]) == 0
    assert all(int(step) > 0 for *_, step in begun[1:])
    for folder in ("whole", "killed"):
        assert {"config.json", "model.safetensors"} <= {path.name for path in (tmp_path / folder / "model").iterdir()}
        entries = [json.loads(line) for line in (tmp_path / folder / "log.jsonl").read_text().splitlines()]
        assert all(entry.keys() >= {"docstrings_per_second", "memory"} for entry in entries if "loss" in entry)
        assert sum("accuracy" in entry for entry in entries) == 2


def test_curves_that_differ_are_noticed() -> None:
    one = {(1, "loss"): 2.0, (2, "loss"): 1.0}
    assert resume.compare(one, one, 0.0) == 0.0
    for other in (2.0 + 2e-12, math.nan):
        with pytest.raises(SystemExit, match=r"loss of step 1 is 2\.0, wanted"):
            resume.compare(one, {**one, (1, "loss"): other}, 1e-13)
    with pytest.raises(SystemExit, match=r"the curves have other entries: \[\(2, 'loss'\)\]"):
        resume.compare(one, {(1, "loss"): 2.0}, 1.0)


def test_steps_that_are_missing_or_there_twice_are_noticed(tmp_path: Path) -> None:
    training = resume.Training(tmp_path, tmp_path, steps=2)
    for steps, message in (((1,), "has the steps \\[1\\], wanted 1 to 2"), ((1, 2, 2), "has step 2 twice")):
        (tmp_path / "log.jsonl").write_text("".join(json.dumps({"step": s, "loss": 1.0}) + "\n" for s in steps))
        with pytest.raises(SystemExit, match=message):
            training.curve()


@pytest.mark.parametrize("name", ["pretrain", "finetune"])
def test_flags_come_before_the_file_and_the_file_before_defaults(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = pytest.importorskip(name).Settings
    file = tmp_path / "mine.toml"
    file.write_text("lr = 1\nsteps = 7\n")
    monkeypatch.setattr(sys, "argv", ["x", "--config", str(file), "--steps", "9", "--save-every", "4"])
    found = read(settings, "")
    assert (found.lr, found.steps, found.save_every, found.clip) == (1.0, 9, 4, settings().clip)
    assert type(found.lr) is float
    file.write_text("learning_rate = 1\n")
    with pytest.raises(SystemExit):
        read(settings, "")
    assert "has learning_rate; known settings:" in capsys.readouterr().err
