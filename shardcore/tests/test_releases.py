"""What releases of torch do differently, and what the doctor says is lost with the installed one."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from tiny import TinyPolicy, build

import shardcore
from shardcore import ShardConfig, _torch
from shardcore.compile import compile_plan
from shardcore.errors import NotSupportedError
from shardcore.pipeline.model import Pipelining
from shardcore_cli.doctor import examine

GATHERS = ("torch.distributed.all_gather_single", "torch.distributed.all_gather_into_tensor")


def findings() -> dict[str, dict[str, str]]:
    return {check["what"]: check for check in examine()["checks"]}


def lose(monkeypatch, *paths):
    for path in paths:
        monkeypatch.delattr(path, raising=False)


@pytest.mark.parametrize(
    ("what", "lost"),
    [
        ("torch.compile in one graph", "and fullgraph=True raises"),
        ("clipping of deferred gradients", "call shardcore.reduce_partial_gradients(model) before clipping"),
        ("pipelines", "pp= above 1 is refused: shard by tp= and dp= alone"),
    ],
)
def test_the_doctor_says_what_an_older_torch_cannot(monkeypatch, what, lost):
    monkeypatch.setattr(torch, "__version__", "2.11.0+cpu")
    found = findings()[what]
    assert found["state"] == "missing"
    assert found["why"].startswith("torch 2.11.0+cpu is older than 2.13: ")
    assert found["why"].endswith(lost)
    monkeypatch.setattr(torch, "__version__", "2.13.0+cpu")
    assert findings()[what]["state"] == "works"


def test_what_the_core_does_is_what_the_doctor_says():
    found = findings()
    assert (found["torch.compile in one graph"]["state"] == "works") == _torch.CAN_TRACE
    assert (found["clipping of deferred gradients"]["state"] == "works") == _torch.SCALES_PARTIAL
    assert (found["pipelines"]["state"] == "works") == _torch.CAN_PIPELINE
    assert found["names of torch"]["state"] == "works"


def test_the_doctor_says_what_is_lost_without_fused_linears(monkeypatch):
    lose(monkeypatch, "torch.distributed._state_dict_utils._distribute_tensors")
    found = findings()["fused column linears"]
    assert found["state"] == "missing"
    assert found["why"].startswith("models in which one linear computes several projections are refused: torch ")
    assert "_distribute_tensors" in found["why"] or "_StridedShardNotDecodableError" in found["why"]


def test_a_public_name_that_is_gone_is_named(monkeypatch):
    lose(monkeypatch, *GATHERS)
    found = findings()["names of torch"]
    said = f"has neither {' nor '.join(GATHERS)}, one of which is needed by everything (collectives of whole tensors)"
    assert found["state"] == "fails"
    assert said in found["why"]
    monkeypatch.delitem(sys.modules, "shardcore._torch")
    with pytest.raises(NotSupportedError, match="has neither"):
        importlib.import_module("shardcore._torch")


def test_one_of_several_names_is_enough(monkeypatch):
    monkeypatch.setattr(GATHERS[0], "new", raising=False)
    lose(monkeypatch, GATHERS[1])
    assert findings()["names of torch"]["state"] == "works"
    monkeypatch.setattr(shardcore, "_torch", _torch)  # an import sets it
    monkeypatch.delitem(sys.modules, "shardcore._torch")
    assert importlib.import_module("shardcore._torch").all_gather_single == "new"


def test_pipelines_are_refused_by_an_older_torch(monkeypatch):
    monkeypatch.setattr("shardcore.pipeline.model.CAN_PIPELINE", False)
    model, config = build(), ShardConfig(tensor_parallel_size=1, pipeline_parallel_size=2)
    plan = compile_plan(TinyPolicy, model, config, device_type="cpu")
    with pytest.raises(NotSupportedError, match=r"pipeline_parallel_size=2 needs torch 2\.13 or newer, here is"):
        Pipelining(model, None).check(plan)
