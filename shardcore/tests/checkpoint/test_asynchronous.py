"""A save in the background: what it saves, who waits for it, and where its errors go."""

from __future__ import annotations

import contextlib
import copy
import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from trainings import Training, largest

import shardcore


@contextlib.contextmanager
def held():
    """Let no part be written before the event that is yielded is set."""
    free, stream = threading.Event(), FileSystem.create_stream

    @contextlib.contextmanager
    def when_free(self, path, mode):
        assert free.wait(30)
        with stream(self, path, mode) as file:
            yield file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", when_free)
        yield free


def in_the_background(folder):
    training = Training({"tp": 2}, steps=1)
    wanted = training.values()
    with held() as free:
        path = training.save(folder, asynchronous=True)
        assert path == Path(folder, "step-0")
        assert not path.exists()
        assert not list(Path(folder).rglob("*.distcp"))
        changed = training.run([1]).values()  # what is trained meanwhile is not in it
        free.set()
        shardcore.wait_for_checkpoint(training.model)
    assert path.exists()
    shardcore.wait_for_checkpoint(training.model)  # there is none now
    assert largest(wanted, changed) > 0
    training.load(path)
    assert largest(training.values(), wanted) == 0


def test_returns_before_the_files_exist(pool, tmp_path):
    pool.run(in_the_background, str(tmp_path))


def the_next_one_waits(folder):
    training = Training({"tp": 2})
    other = Training({"tp": 2}, seed=3)  # of another model, at the same time
    with held() as free:
        training.save(f"{folder}/one", asynchronous=True)
        other.save(f"{folder}/two", asynchronous=True)
        threading.Timer(0.2, free.set).start()
        training.save(f"{folder}/one", keep_last=9)
    assert sorted(path.name for path in Path(folder, "one").iterdir()) == ["step-0", "step-1"]
    training.save(f"{folder}/one", asynchronous=True)
    assert training.load(f"{folder}/one").step == 2  # a load waits too
    shardcore.wait_for_checkpoint(other.model)
    assert shardcore.latest(f"{folder}/two") == Path(folder, "two", "step-0")


def test_the_next_save_waits(pool, tmp_path):
    pool.run(the_next_one_waits, str(tmp_path))


def test_its_error_is_raised_by_the_next_call(tmp_path, monkeypatch, caplog):
    model = nn.Linear(2, 2)

    def refuse(self, path, mode):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.ERROR, "shardcore"):
        patch.setattr(FileSystem, "create_stream", refuse)
        shardcore.save_checkpoint(tmp_path, model, asynchronous=True)
        with pytest.raises(shardcore.CheckpointError, match="No space left") as caught:
            shardcore.wait_for_checkpoint(model)
    assert "asynchronous save; no checkpoint was made of it" in caught.value.__notes__[0]
    assert "step-0 was not saved: writing to" in caplog.text  # for those who never ask
    assert list(tmp_path.iterdir()) == []
    shardcore.wait_for_checkpoint(model)  # once
    assert shardcore.save_checkpoint(tmp_path, model).name == "step-0"


_SCRIPT = """
import sys, time, torch, shardcore
from torch.distributed.checkpoint.filesystem import FileSystem
stream = FileSystem.create_stream
def slow(self, path, mode):
    time.sleep(0.3)
    return stream(self, path, mode)
FileSystem.create_stream = slow
path = shardcore.save_checkpoint(sys.argv[1], torch.nn.Linear(2, 2), asynchronous=True)
print(path.exists())
"""


@pytest.mark.nightly
def test_the_end_of_the_process_waits(tmp_path):
    command = [sys.executable, "-c", _SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "False\n"
    assert shardcore.latest(tmp_path) == tmp_path / "step-0"


def test_a_copy_of_the_model_does_not_wait(tmp_path):
    model = nn.Linear(2, 2)
    with held() as free:
        shardcore.save_checkpoint(tmp_path, model, asynchronous=True)
        twin = copy.deepcopy(model)
        begun = time.monotonic()
        shardcore.wait_for_checkpoint(twin)
        assert time.monotonic() - begun < 10
        torch.save(model, tmp_path / "whole")
        free.set()
        shardcore.wait_for_checkpoint(model)
