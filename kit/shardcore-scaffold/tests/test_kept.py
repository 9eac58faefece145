"""Policies that are kept for the next run: what they answer for, and what makes them out of date."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from shardcore_scaffold import inferred, kept

TOLD = {"source": "class NetPolicy: ...", "doubts": [], "split": 1.0, "whole": {}, "proof": "all of it"}
SOURCE = """
import json
from torch import nn

class Config:
    def __init__(self, **values): self.values = values
    def to_json_string(self, use_diff): return json.dumps(self.values)

class Net(nn.Module):
    config_class = Config
    def __init__(self, config):
        super().__init__()
        self.config, self.inner = config, nn.Linear(2, 2)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "kept_net.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("SHARDCORE_CACHE", str(tmp_path / "cache"))
    yield importlib.import_module("kept_net")
    del sys.modules["kept_net"]


@pytest.fixture
def asked(monkeypatch):
    """The processes that were started, each of which finds a policy."""
    processes = []

    def run(command, **options):
        processes.append(json.loads(options["input"]))
        return SimpleNamespace(returncode=0, stdout=json.dumps(processes[-1].get("told", TOLD)), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return processes


def _asked(model, how="proved"):
    return inferred._asked(model, how, 1.0)


def test_it_is_inferred_once(module, asked, caplog):
    model = module.Net(module.Config(width=2))
    assert _asked(model) == TOLD
    again = _asked(module.Net(module.Config(width=2, _name_or_path="another folder")))
    assert len(asked) == 1
    assert again == {**TOLD, "file": again["file"]}
    inferred._say("Net", again)
    assert f"in an earlier run, which kept it in {again['file']}, and splits 100%" in caplog.text
    assert kept.said().startswith("1 in ")


@pytest.mark.parametrize("changed", ["config", "how", "class", "torch", "packs", "own", "file", "folder"])
def test_what_makes_it_out_of_date(module, asked, tmp_path, monkeypatch, changed):
    model, how = module.Net(module.Config(width=2)), "proved"
    _asked(model)
    (file,) = (tmp_path / "cache" / "inferred").iterdir()
    if changed == "config":
        model = module.Net(module.Config(width=3))
    elif changed == "how":
        how = "drafted"
    elif changed == "class":
        (tmp_path / "kept_net.py").write_text(SOURCE + "    def forward(self, x): return x\n")
    elif changed == "torch":
        monkeypatch.setattr(kept, "installed", lambda name: "0.0")
    elif changed == "packs":
        monkeypatch.setattr(kept, "default_registry", lambda: SimpleNamespace(packs=()))
    elif changed == "own":
        monkeypatch.setattr(kept, "_OWN", ("shardcore",))
    elif changed == "file":
        file.write_text(file.read_text()[:-5])
    else:
        monkeypatch.setenv("SHARDCORE_CACHE", "")
    assert _asked(model, how) == TOLD
    assert len(asked) == 2
    _asked(model, how)
    assert len(asked) == 2 + (changed == "folder")


def test_what_shardcore_and_packs_are_made_of_counts(tmp_path, monkeypatch):
    """Not where it lies: two checkouts of one state share what they found."""
    for folder, text in (("a", "x = 1"), ("b", "x = 1"), ("c", "x = 2")):
        (tmp_path / folder / "kept_pack" / "inner").mkdir(parents=True)
        (tmp_path / folder / "kept_pack" / "__init__.py").touch()
        (tmp_path / folder / "kept_pack" / "inner" / "policy.py").write_text(text)
    found = []
    for folder in "abc":
        with monkeypatch.context() as patch:
            patch.syspath_prepend(tmp_path / folder)
            found.append(kept._digest(map(Path, set(kept._sources(["kept_pack", "not_installed_at_all"])))))
    assert found[0] == found[1] != found[2]


def test_what_was_refused_is_not_kept(module, asked, tmp_path, monkeypatch):
    monkeypatch.setitem(TOLD, "error", "no policy")
    assert _asked(module.Net(module.Config()))["error"] == "no policy"
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_hinders_nothing(module, asked, tmp_path, monkeypatch, caplog):
    (tmp_path / "cache").touch()
    assert _asked(module.Net(module.Config())) == TOLD
    assert "could not be kept for the next run" in caplog.text
    assert "SHARDCORE_CACHE names another folder" in caplog.text


def test_a_class_without_a_file_is_asked_for_each_time(module):
    typed = type("Typed", (nn.Module,), {"__module__": "no_module_of_a_file"})
    model = module.Net(module.Config())
    assert kept.place(model, "{}", proved=True)
    model.inner = typed()
    assert kept.place(model, "{}", proved=True) is None


def test_where_it_is(monkeypatch, tmp_path):
    monkeypatch.delenv("SHARDCORE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.folder() == tmp_path / "shardcore" / "inferred"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept.folder() == tmp_path / ".cache" / "shardcore" / "inferred"
    monkeypatch.setenv("SHARDCORE_CACHE", "")
    assert kept.folder() is None
    assert kept.said() == "nowhere: SHARDCORE_CACHE is empty"
