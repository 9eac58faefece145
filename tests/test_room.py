"""A run of all sessions begins where the disk has room for it."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import namedtuple
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import room  # from tools/

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("free", "said"), [(20e9, ""), (8.6e9, "about 13 GB more on the disk of ")])
def test_a_disk_that_is_nearly_full_is_told_of_before_anything_runs(tmp_path, monkeypatch, free, said):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(252e9, 93e9, free))
    found = room.lacking(tmp_path / "not" / "made" / "yet", 12e9)
    assert found.startswith("the environments") if said else not found
    assert said in found
    assert not said or "8.6 GB free" in found


def test_what_is_there_already_needs_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Usage(252e9, 93e9, 8.6e9))
    with (tmp_path / "wheel").open("wb") as file:
        file.truncate(9_000_000_000)  # sparse
    assert not room.lacking(tmp_path, 12e9)
