"""What is printed of an error that nobody catches."""

from __future__ import annotations

import json
import sys
import traceback

import pytest
from tiny import TinyPolicy, build

import shardcore
from shardcore.apply import errors
from shardcore.errors import AgreementError, ConfigError


@pytest.fixture
def end(monkeypatch, tmp_path):
    """Return what ends a process of this rank, with the hook around Python's own: what torchrun is told, too."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    errors.tell_once()
    first = sys.excepthook
    errors.tell_once()
    assert sys.excepthook is first

    def ended(error, rank=None):
        monkeypatch.setattr(errors.dist, "is_initialized", lambda: rank is not None)
        monkeypatch.setattr(errors.dist, "get_rank", lambda: rank)
        sys.excepthook(type(error), error, error.__traceback__)
        file = tmp_path / "error.json"
        return json.loads(file.read_text())["message"]["extraInfo"]["py_callstack"] if file.exists() else None

    return ended


def _raised():
    script = compile("shard(build(), policy=TinyPolicy, tp=2)", "train.py", "exec")  # there is no second rank
    with pytest.raises(ConfigError) as caught:
        exec(script, {"__name__": "__main__", "shard": shardcore.shard, "build": build, "TinyPolicy": TinyPolicy})
    return caught.value


def test_it_is_printed_without_frames_of_shardcore(end, capsys):
    error = _raised()
    error.told_by = 1
    before = traceback.extract_tb(error.__traceback__)
    told = end(error, rank=1)
    assert told == f"ConfigError: {error}"
    printed = capsys.readouterr().err
    assert printed.endswith(f'File "train.py", line 1, in <module>\nshardcore.errors.{told}\n')
    assert traceback.extract_tb(error.__traceback__) == before  # for a debugger


def test_on_ranks_that_have_the_same_to_say_it_is_one_line(end, capsys):
    error = AgreementError("ranks 0 and 1 differ\nin much")
    error.told_by = 0
    line = "AgreementError, in full on rank 0: ranks 0 and 1 differ"
    assert end(error, rank=1) == line
    assert capsys.readouterr().err == f"[rank1]: {line}\n"


def test_other_errors_are_left_alone(end, capsys):
    with pytest.raises(pytest.fail.Exception) as caught:
        pytest.fail("as ever")
    assert end(caught.value, rank=0) is None
    assert capsys.readouterr().err.count('File "') > 1


def test_torchrun_is_told_of_what_fails_before_there_is_a_process_group(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with pytest.raises(ConfigError, match="unknown configuration field 'tpp'"):
        shardcore.shard(build(), policy=TinyPolicy, tpp=2)
    assert sys.excepthook is not sys.__excepthook__
