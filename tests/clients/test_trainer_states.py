"""What a Trainer evaluates, saves and takes up again is that of the unsharded model, on any mesh."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packaging.version import Version

pytest.importorskip("accelerate", reason="the Trainer of transformers needs accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

import transformers  # comes with accelerate

from shardcore import ShardcoreWarning
from trainings_by_clients import evaluated, llama, resumed  # from support/

TP2 = {"tp": 2}
DP2 = {"tp": 1, "dp": 2}
TP2DP2 = {"tp": 2, "dp": 2}
#: The step after which trainings go on. In a later epoch than the first, transformers 4 draws other data for the rest.
HALF_WAY = 6 if Version(transformers.__version__) >= Version("5") else 4


pytestmark = pytest.mark.usefixtures("float64_throughout")


def ranks(mesh: dict[str, Any]) -> int:
    return mesh["tp"] * mesh.get("dp", 1)


def timeless(metrics: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in metrics.items() if not k.endswith(("_runtime", "_per_second", "_time"))}


@pytest.mark.parametrize("mesh", [TP2, DP2, TP2DP2, {**TP2, "parallel_output": True}], ids=str)
@pytest.mark.parametrize("rows", [10, 3])
def test_evaluates_and_predicts_each_row_once(pool, tmp_path, mesh, rows):
    (wanted,) = pool.run(evaluated, str(tmp_path), None, {}, rows, world=1)
    assert wanted["logits"].shape == (rows, 12, 97)
    # The Trainer averages the means of batches: of as many rows in all.
    settings = {"per_device_eval_batch_size": 4 // mesh.get("dp", 1)}
    for got in pool.run(evaluated, str(tmp_path), mesh, settings, rows, world=ranks(mesh)):
        np.testing.assert_allclose(got["logits"], wanted["logits"], rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(got["labels"], wanted["labels"])
        assert got["metrics"].keys() == wanted["metrics"].keys()
        assert timeless(got["metrics"]) == pytest.approx(timeless(wanted["metrics"]), rel=1e-6)
        assert timeless(got["predicted"]) == pytest.approx(timeless(wanted["predicted"]), rel=1e-6)


def same(got: dict[str, Any], wanted: dict[str, Any], *, exactly: bool = False) -> None:
    assert got["steps"] == wanted["steps"]
    for name, parameter in wanted["parameters"].items():
        bound = 0.0 if exactly else 1e-9
        torch.testing.assert_close(got["parameters"][name], parameter, rtol=bound, atol=bound)
    mine, other = got["history"], wanted["history"]
    assert [row["step"] for row in mine] == [row["step"] for row in other]
    for a, b in zip(mine, other, strict=True):
        for name in a.keys() & {"loss", "grad_norm", "eval_loss", "learning_rate", "epoch"}:
            assert a[name] == pytest.approx(b[name], rel=1e-6), (name, a, b)
    assert got["total_flos"] == wanted["total_flos"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after"), [(TP2, TP2), (TP2, DP2), (DP2, TP2), (TP2DP2, TP2), (TP2, TP2DP2)], ids=str
)
def test_resumes_on_the_same_and_on_another_mesh(pool, tmp_path, before, after):
    """The first training ends in the middle of an epoch, and the second one begins there."""
    (wanted,) = pool.run(resumed, str(tmp_path / "one"), None, {"num_train_epochs": 2}, world=1)

    def settings(mesh: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"num_train_epochs": 2, "per_device_train_batch_size": 4 // mesh.get("dp", 1), **more}

    folder = str(tmp_path / "more")
    pool.run(resumed, folder, before, settings(before), world=ranks(before))
    checkpoint = f"{folder}/checkpoint-{HALF_WAY}"
    for got in pool.run(resumed, folder, after, settings(after), checkpoint, world=ranks(after)):
        same(got, wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_dropout_goes_on_bit_for_bit(pool, tmp_path, mesh):
    settings = {"num_train_epochs": 2, "per_device_train_batch_size": 4 // mesh.get("dp", 1)}
    folder = str(tmp_path)
    straight = pool.run(resumed, folder, mesh, settings, build=forgetful, world=ranks(mesh))
    checkpoint = f"{folder}/checkpoint-{HALF_WAY}"
    again = pool.run(resumed, folder, mesh, settings, checkpoint, build=forgetful, world=ranks(mesh))
    for got, wanted in zip(again, straight, strict=True):
        same(got, wanted, exactly=True)
        # From which data are drawn; batches were skipped, and a loader began, in between.
        assert got["generators"][1] == wanted["generators"][0][HALF_WAY]


def goes_on_from_what_is_complete(folder: str, mesh: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    with pytest.warns(ShardcoreWarning, match=rf"checkpoint-9 in .*going on from checkpoint-{HALF_WAY}"):
        return resumed(folder, mesh, settings, True)


@pytest.mark.nightly
@pytest.mark.parametrize("left", ["nothing", "a torn file"])
def test_goes_on_from_the_newest_that_is_complete(pool, tmp_path, left):
    """A job that was killed while it saved leaves a checkpoint without the Trainer's state, or with a part of it."""
    settings = {"num_train_epochs": 2}
    folder = tmp_path / "more"
    (wanted, _) = pool.run(resumed, str(folder), TP2, settings, world=2)
    for path in folder.iterdir():
        if int(path.name.rpartition("-")[2]) > HALF_WAY:
            shutil.rmtree(path)
    torn = folder / "checkpoint-9"
    shutil.copytree(folder / f"checkpoint-{HALF_WAY}", torn)
    whole = (torn / "trainer_state.json").read_text()
    (torn / "trainer_state.json").unlink()
    if left == "a torn file":
        (torn / "trainer_state.json").write_text(whole[: len(whole) // 2])
    for got in pool.run(goes_on_from_what_is_complete, str(folder), TP2, settings, world=2):
        same(got, wanted)


def test_none_that_is_complete_is_said(pool, tmp_path):
    (tmp_path / "checkpoint-2").mkdir()
    with pytest.raises(Exception, match=r"is complete: checkpoint-2 lack trainer_state\.json") as caught:
        pool.run(resumed, str(tmp_path), TP2, {}, True, world=2)
    assert len(caught.value.failures) == 2


def forgetful() -> Any:
    return llama(attention_dropout=0.3)


def test_what_is_saved_is_the_unsharded_model(pool, tmp_path):
    from transformers import LlamaForCausalLM

    folder = tmp_path / "more"
    found = pool.run(resumed, str(folder), TP2, {"save_total_limit": 1}, world=2)
    (checkpoint,) = folder.iterdir()
    assert checkpoint.name == "checkpoint-5"
    saved = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    for name, parameter in saved.named_parameters():
        torch.testing.assert_close(parameter.detach(), found[0]["parameters"][name], rtol=0, atol=0)
    assert {path.name for path in (checkpoint / "shardcore").iterdir()} == {"step-0"}
    assert not (checkpoint / "optimizer.pt").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("only_model", [False, True])
@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_loads_the_best_model_at_the_end(pool, tmp_path, mesh, only_model):
    settings = {
        "load_best_model_at_end": True,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "logits",  # falls from the first evaluation on, so that the first one is the best
        "greater_is_better": True,
        "save_only_model": only_model,
    }
    from trainings_by_clients import accuracy

    more = {"compute_metrics": accuracy}
    (wanted,) = pool.run(resumed, str(tmp_path / "one"), None, settings, world=1, **more)
    settings = {**settings, "per_device_train_batch_size": 4 // mesh.get("dp", 1)}
    settings |= {"per_device_eval_batch_size": 4 // mesh.get("dp", 1)}
    for got in pool.run(resumed, str(tmp_path / "more"), mesh, settings, world=ranks(mesh), **more):
        assert Path(got["best"]).name == Path(wanted["best"]).name
        same(got, wanted)
    assert llama().num_parameters()


def test_refuses_the_optimizer_of_an_unsharded_training(pool, tmp_path):
    pool.run(resumed, str(tmp_path), None, {}, world=1)
    with pytest.raises(Exception, match="has the state of an optimizer") as caught:
        pool.run(resumed, str(tmp_path), TP2, {}, f"{tmp_path}/checkpoint-2", world=2)
    assert len(caught.value.failures) == 2
