"""Which checkpoint is the newest complete one, and what is said of the others."""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil

import pytest
import torch

import shardcore
from shardcore.checkpoint import folders
from shardcore.errors import CheckpointError, ConfigError, ShardcoreWarning


def saved(folder, *steps, **options):
    for step in steps:
        shardcore.save_checkpoint(folder, _filled(step), step=step, **options)


def _filled(value):
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    return model


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_newest_is_that_of_the_largest_step(tmp_path):
    assert shardcore.latest(tmp_path / "none") is None
    saved(tmp_path, 9, 10, 2)
    (tmp_path / "notes").mkdir()
    assert shardcore.latest(tmp_path) == tmp_path / "step-10"
    assert shardcore.save_checkpoint(str(tmp_path), _filled(0)) == tmp_path / "step-11"


def _truncate(path):
    part = path / "__0_0.distcp"
    part.write_bytes(part.read_bytes()[:-1])


def _later(path):
    index = json.loads((path / "shardcore.json").read_text())
    (path / "shardcore.json").write_text(json.dumps({**index, "format": 99}))


_BREAKAGES = {
    "a truncated part": (_truncate, r"__0_0.distcp has \d+ bytes and was written with"),
    "a missing part": (lambda path: (path / "__0_0.distcp").unlink(), "__0_0.distcp cannot be read: No such file"),
    "no list of tensors": (lambda path: (path / ".metadata").unlink(), r"\.metadata cannot be read"),
    "no index": (lambda path: (path / "shardcore.json").unlink(), "shardcore.json cannot be read"),
    "half an index": (lambda path: (path / "shardcore.json").write_text("{"), "shardcore.json is damaged"),
    "no entries": (lambda path: (path / "shardcore.json").write_text("[]"), "not the index of a checkpoint"),
    "a later format": (_later, "the format 99, and this release"),
    "cut short": (lambda path: path.rename(f"{path}.tmp-0a"), "its save was cut short, or is still running"),
}


@pytest.mark.parametrize(("damage", "words"), _BREAKAGES.values(), ids=_BREAKAGES)
def test_a_broken_one_is_named_and_skipped(tmp_path, damage, words):
    saved(tmp_path, 1, 2)
    damage(tmp_path / "step-2")
    broken = next(path for path in tmp_path.iterdir() if path.name.startswith("step-2"))
    with pytest.warns(ShardcoreWarning, match=f"{broken}.*{words}"):
        assert shardcore.latest(tmp_path) == tmp_path / "step-1"
    model = _filled(7)
    with pytest.warns(ShardcoreWarning, match=words):
        assert shardcore.load_checkpoint(tmp_path, model).step == 1
    assert set(model.weight.flatten().tolist()) == {1.0}
    with pytest.raises(CheckpointError, match=words):
        shardcore.load_checkpoint(broken, model)
    assert set(model.weight.flatten().tolist()) == {1.0}


def test_no_complete_one(tmp_path):
    with pytest.raises(CheckpointError, match="holds no complete checkpoint"):
        shardcore.load_checkpoint(tmp_path, _filled(0))
    with pytest.raises(CheckpointError, match="there is no such folder"):
        shardcore.load_checkpoint(tmp_path / "step-3", _filled(0))


def test_an_existing_one_is_never_written_into(tmp_path):
    saved(tmp_path, 3)
    before = {path: path.read_bytes() for path in (tmp_path / "step-3").iterdir()}
    with pytest.raises(CheckpointError, match=r"step-3 exists, and nothing is ever written into"):
        saved(tmp_path, 3)
    assert names(tmp_path) == ["step-3"]
    assert {path: path.read_bytes() for path in (tmp_path / "step-3").iterdir()} == before


def test_keep_last(tmp_path):
    saved(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-4" / "shardcore.json").unlink()  # broken ones neither count nor go
    saved(tmp_path, 5, keep_last=2)
    assert names(tmp_path) == ["step-3", "step-4", "step-5"]
    saved(tmp_path, 0, keep_last=1)  # what was just written stays
    assert names(tmp_path) == ["step-0", "step-4"]


def test_leftovers_go_with_the_next_save(tmp_path):
    saved(tmp_path, 1)
    shutil.copytree(tmp_path / "step-1", tmp_path / "step-9.tmp-ab")
    saved(tmp_path, 2)
    assert names(tmp_path) == ["step-1", "step-2"]


def _no_locks(handle, operation):
    raise OSError(errno.ENOLCK, "No locks available")


def test_what_another_job_is_writing_stays_and_is_said(tmp_path, monkeypatch):
    saved(tmp_path, 1)
    theirs = tmp_path / "step-9.tmp-ab"
    shutil.copytree(tmp_path / "step-1", theirs)
    claim = folders.Claim()
    claim.take(theirs)
    with pytest.warns(ShardcoreWarning, match=r"another job is writing .*step-9.tmp-ab"):
        saved(tmp_path, 2, keep_last=1)
    assert names(tmp_path) == ["step-2", "step-9.tmp-ab"]
    with pytest.warns(ShardcoreWarning, match="step-9.tmp-ab .* was skipped"):
        assert shardcore.latest(tmp_path) == tmp_path / "step-2"
    claim.give_up()  # as the end of its process does
    saved(tmp_path, 3)
    assert names(tmp_path) == ["step-2", "step-3"]
    # Where a file system has no locks, the time of the last change tells.
    theirs.mkdir()
    monkeypatch.setattr(fcntl, "flock", _no_locks)
    with pytest.warns(ShardcoreWarning, match="another job"):
        saved(tmp_path, 4)
    assert theirs.exists()
    os.utime(theirs, (0, 0))
    saved(tmp_path, 5)
    assert not theirs.exists()


def test_what_cannot_be_removed_is_said(tmp_path, monkeypatch):
    saved(tmp_path, 1)

    def refuse(path):
        raise PermissionError(13, "no")

    monkeypatch.setattr(shutil, "rmtree", refuse)
    with pytest.warns(ShardcoreWarning, match="step-1 should have been removed, and could not be"):
        saved(tmp_path, 2, keep_last=1)
    assert shardcore.latest(tmp_path) == tmp_path / "step-2"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"keep_last": 0}, "keep_last= must be a positive integer"),
        ({"keep_last": True}, "keep_last="),
        ({"step": -1}, "step= must be an integer from 0"),
        ({"step": 1.0}, "step="),
        ({"asynchronous": 1}, "asynchronous= must be True or False"),
        ({"scheduler": object()}, "scheduler= must have state_dict"),
        ({"loader": [1]}, "loader= must have state_dict"),
        ({"optimizer": object()}, "optimizer= must be a torch.optim.Optimizer"),
    ],
)
def test_wrong_arguments(tmp_path, options, words):
    with pytest.raises(ConfigError, match=words):
        shardcore.save_checkpoint(tmp_path / "new", _filled(0), **options)
    assert names(tmp_path) == []


def test_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"making a folder for a checkpoint.* failed: NotADirectoryError"):
        shardcore.save_checkpoint(tmp_path / "file" / "folder", _filled(0))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_sees_how_far_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    saved(tmp_path, 1)
    shardcore.load_checkpoint(tmp_path, _filled(0))
    last = [line.split("\r")[-1].split("|")[0] for line in terminal.getvalue().splitlines() if "100%" in line]
    assert last == ["saving step-1: 100%", "reading step-1: 100%"]
