"""What the commands say of an environment: of packs and libraries that are absent, optional or broken."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import importlib_metadata
import pytest
import torch
from click.testing import CliRunner
from given_packs import install, offers, serves

import shardcore
from shardcore_cli import main
from shardcore_cli.surroundings import torch_failure


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def checks():
    return {check["what"]: check for check in json.loads(run("doctor", "--json", "--quick").stdout)["checks"]}


def test_a_class_with_a_policy_for_each_release_of_its_library_is_listed_once(target):
    specs = [f"PolicySpec(target='m.Model', policy='shard_one.policy:P', requires='torch{r}')" for r in (">=1", "<1")]
    install(target, "one", offers("shardcore_policies", *specs))
    (row,) = (row for row in json.loads(run("packs", "--json").stdout) if row["name"] == "one")
    assert row["classes"] == ["m.Model"]
    assert checks()["pack one (shard-one 1.0)"]["why"] == "1 class"


def test_a_library_that_is_optional_is_not_outside_of_a_range(target):
    requires = ["needed-library>=1", *(f"{name}-library>=1; extra == 'tested'" for name in ("needed", "other"))]
    install(target, "one", offers("shardcore_policies"), requires=requires)
    assert checks()["pack one (shard-one 1.0)"] == {
        "what": "pack one (shard-one 1.0)",
        "state": "missing",
        "why": "0 classes; needed-library is not installed; other-library is optional, not installed",
    }


def test_no_pack_at_all_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setattr(importlib_metadata, "distributions", list)
    done = run("packs")
    assert done.exit_code == 0
    assert "no pack is installed" in done.output
    assert re.search(
        r"python -m pip install \S+/clients/shardcore-transformers \S+/packs/shard-llama; others: shard-albert, ",
        done.output,
    )
    assert "shardcore new-pack" in done.output


def test_a_backend_without_a_device_does_not_work(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = checks()
    assert (found["nccl"]["state"], found["CUDA devices"]["state"]) == ("missing", "missing")
    assert "no CUDA device" in found["nccl"]["why"]


@pytest.mark.parametrize(
    ("value", "said"), [("", "set OMP_NUM_THREADS so that ranks do not"), ("3", "; OMP_NUM_THREADS is 3")]
)
def test_what_is_set_is_not_advised(monkeypatch, value, said):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert said in checks()["CPU cores"]["why"]


def with_torch(tmp_path, source, *arguments):
    """Run the command where torch is a module of the given source."""
    (tmp_path / "torch.py").write_text(source)
    install(tmp_path, "one", serves("shard_one"))
    path = [str(tmp_path), str(Path(shardcore.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", f"from shardcore_cli import main; main({list(arguments)})"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "ModuleNotFoundError: No module named 'torch'"),
        ("raise OSError('libtorch.so: cannot open shared object')", "OSError: libtorch.so: cannot open shared object"),
        ("import sys\nsys.exit(7)", "PackError: import torch tried to end the process, with exit code 7"),
    ],
)
@pytest.mark.parametrize("command", [["doctor"], ["explain", "LlamaForCausalLM"]])
def test_a_broken_torch_is_a_finding(tmp_path, source, reason, command):
    done = with_torch(tmp_path, source, *command)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert reason in (done.stdout if command == ["doctor"] else done.stderr)
    if command == ["doctor"]:
        assert "torch\tfails\t" in done.stdout
        assert "shardcore\t0." in done.stdout  # and all that does not need torch is said
        packs = [line.split("\t") for line in done.stdout.splitlines() if line.startswith("pack ")]
        assert ["pack one (shard-one 1.0)", "not tried", "torch fails; 1 class"] in packs
        assert {state for _, state, _ in packs} <= {"not tried", "missing"}
    else:
        assert done.stderr.startswith("error: torch fails: ")


def test_a_torch_that_imports_and_does_not_work_is_a_finding(tmp_path):
    done = with_torch(tmp_path, "__version__ = '2.0'", "doctor")
    assert done.returncode == 1, done.stderr
    assert "torch\tfails\tModuleNotFoundError: No module named 'torch.distributed'" in done.stdout


def test_what_an_uninstaller_leaves_of_torch_is_no_torch(monkeypatch):
    assert torch_failure() is None
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert "it has no version" in torch_failure()
