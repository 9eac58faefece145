"""transformers' Trainer on sharded models trains, reports and saves what it does with the unsharded model."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

# The workers of the pool inherit the path.
sys.path.insert(0, str(Path(__file__).parent / "support"))

from trainings_by_clients import llama, mixtral, trained  # from support/

#: The mesh, and into how many parts a batch is divided.
MESHES = {
    "tp2": ({"tp": 2}, 1),
    "dp2": ({"tp": 1, "dp": 2}, 2),
    "tp2dp2": ({"tp": 2, "dp": 2}, 2),
    "replicated": ({"tp": 2, "dp_replicate_size": 2}, 2),
}
#: The replicas share the experts of a mixture.
SHARED = {"tp": 1, "dp": 2, "ep": 2}
IN_ONE_MODULE = pytest.mark.skipif(Version(version("transformers")) < Version("5"), reason="experts are modules there")


pytestmark = pytest.mark.usefixtures("float64_throughout")


def ranks(mesh: dict[str, Any]) -> int:
    count = 1
    for axis, size in mesh.items():
        count *= 1 if axis == "ep" else size
    return count


def same(got: dict[str, Any], wanted: dict[str, Any], bound: float = 1e-9) -> None:
    assert got["steps"] == wanted["steps"]
    assert len(got["history"]) == len(wanted["history"])
    for mine, other in zip(got["history"], wanted["history"], strict=True):
        assert mine.keys() == other.keys()
        for name in mine.keys() & {"loss", "grad_norm", "learning_rate", "epoch", "step", "num_input_tokens_seen"}:
            # The Trainer sums losses in float32.
            assert mine[name] == pytest.approx(other[name], rel=1e-6 if name == "loss" else bound), (name, mine, other)
    assert got["total_flos"] == wanted["total_flos"]
    for name, parameter in wanted["parameters"].items():
        torch.testing.assert_close(got["parameters"][name], parameter, rtol=bound, atol=bound)


@pytest.mark.parametrize("name", [*MESHES, pytest.param("ep2", marks=[pytest.mark.nightly, IN_ONE_MODULE])])
def test_trains_as_unsharded(pool, tmp_path, name):
    mesh, parts = (SHARED, 2) if name == "ep2" else MESHES[name]
    build = mixtral if mesh is SHARED else llama
    settings = {"max_grad_norm": 0.3, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    (wanted,) = pool.run(trained, str(tmp_path / "one"), None, settings, build, world=1)
    settings = {**settings, "per_device_train_batch_size": 4 // parts}
    found = pool.run(trained, str(tmp_path / "more"), mesh, settings, build, world=ranks(mesh))
    for got in found:
        same(got, wanted)
