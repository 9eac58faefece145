"""What Accelerate saves of sharded models goes on as the unsharded training, on any mesh."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from loops_by_accelerate import fresh, loop, prepared  # from support/

import shardcore
from shardcore_testing.parity import whole
from trainings_by_clients import llama, parameters, words  # from support/

TP2 = {"tp": 2}
DP2 = {"tp": 1, "dp": 2}
DP4 = {"tp": 1, "dp": 4}
TP2DP2 = {"tp": 2, "dp": 2}


pytestmark = pytest.mark.usefixtures("float64_throughout")


def ranks(mesh: dict[str, Any]) -> int:
    return mesh["tp"] * mesh.get("dp", 1)


def moments(model: Any, optimizer: Any) -> dict[str, Any]:
    """The state of the optimizer, full tensors, by the names of the unsharded model."""
    state = optimizer.optimizer.state
    return {
        f"{name}.{key}": whole(value).detach().clone()
        for name, parameter in model.named_parameters()
        for key, value in state[parameter].items()
    }


def goes_on(
    accelerator: Any, mesh: dict[str, Any] | None, model: Any, optimizer: Any, scheduler: Any
) -> dict[str, Any]:
    """What there is now, and what a second pass, over other rows, makes of it."""
    now = {"parameters": parameters(model), "moments": moments(model, optimizer), "lr": scheduler.get_last_lr()}
    rows = DataLoader(words(16, seed=5), batch_size=4 // (mesh or {}).get("dp", 1))
    said = loop(accelerator, model, optimizer, accelerator.prepare(rows), scheduler)
    then = {"parameters": parameters(model), "moments": moments(model, optimizer), "lr": scheduler.get_last_lr()}
    return {"now": now, "said": said, "then": then}


def saves(folder: str, mesh: dict[str, Any] | None, schedule: str) -> dict[str, Any]:
    """One pass, a save, and a second pass."""
    accelerator = fresh()
    model, optimizer, loader, scheduler = prepared(mesh, accelerator, schedule=schedule)
    loop(accelerator, model, optimizer, loader, scheduler)
    accelerator.save_state(folder)
    accelerator.save_state(folder)  # over the first one
    return goes_on(accelerator, mesh, model, optimizer, scheduler)


def loads(folder: str, mesh: dict[str, Any], schedule: str, again: str | None = None) -> dict[str, Any]:
    """A pass of which nothing is left after the load, and the second pass; with ``again`` saved there, and loaded."""
    accelerator = fresh()
    model, optimizer, loader, scheduler = prepared(mesh, accelerator, schedule=schedule)
    loop(accelerator, model, optimizer, loader, scheduler)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    accelerator.load_state(folder)
    if again:
        accelerator.save_state(again)
        accelerator.load_state(again)
    return goes_on(accelerator, mesh, model, optimizer, scheduler)


def same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for when in ("now", "then"):
        assert got[when]["lr"] == pytest.approx(wanted[when]["lr"], rel=1e-9), when
        for what in ("parameters", "moments"):
            assert got[when][what].keys() == wanted[when][what].keys()
            for name, value in wanted[when][what].items():
                torch.testing.assert_close(got[when][what][name], value, rtol=1e-9, atol=1e-9, msg=f"{when} {name}")
    assert len(got["said"]) == len(wanted["said"])
    for mine, other in zip(got["said"], wanted["said"], strict=True):
        assert mine == pytest.approx(other, rel=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("before", "after"),
    [(TP2, TP2), (TP2, TP2DP2), (TP2DP2, TP2DP2), (TP2DP2, TP2), (DP2, TP2), (DP2, DP4), (TP2DP2, DP4)],
    ids=str,
)
def test_state_is_taken_up_on_the_same_and_on_another_mesh(pool, tmp_path, before, after):
    (wanted,) = pool.run(saves, str(tmp_path / "one"), None, "function", world=1)
    folder = str(tmp_path / "more")
    for got in pool.run(saves, folder, before, "function", world=ranks(before)):
        same(got, wanted)
    for got in pool.run(loads, folder, after, "function", world=ranks(after)):
        same(got, wanted)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", ["cosine", "warmed"])
@pytest.mark.parametrize(("before", "after"), [(DP2, TP2), (TP2, DP2)], ids=str)
def test_a_schedule_that_has_its_lengths_in_its_state_goes_on(pool, tmp_path, before, after, schedule):
    """Also where what was loaded is saved, and loaded once more."""
    (wanted,) = pool.run(saves, str(tmp_path / "one"), None, schedule, world=1)
    folder = str(tmp_path / "more")
    pool.run(saves, folder, before, schedule, world=ranks(before))
    for got in pool.run(loads, folder, after, schedule, str(tmp_path / "again"), world=ranks(after)):
        same(got, wanted)


@pytest.mark.nightly
def test_a_schedule_of_both_kinds_goes_on_over_as_many_replicas_alone(pool, tmp_path):
    folder = str(tmp_path)
    first, _ = pool.run(saves, folder, DP2, "mixed", world=2)
    for got in pool.run(loads, folder, TP2DP2, "mixed", world=4):
        same(got, first)
    with pytest.raises(Exception, match="Load on as many replicas as the state was saved on") as caught:
        pool.run(loads, folder, TP2, "mixed", world=2)
    assert [failure.error for failure in caught.value.failures] == ["NotSupportedError"] * 2


def counts_batches(folder: str, before: int | None, mesh: dict[str, Any]) -> tuple[int, list[int]]:
    """The batches since gradients were summed, and the generator of the process."""
    accelerator = fresh(gradient_accumulation_steps=4)
    accelerator.prepare(*prepared_model(mesh))
    torch.manual_seed(dist.get_rank())
    if before is not None:
        accelerator.step = before
        accelerator.save_state(folder)
    else:
        accelerator.load_state(folder)
    return accelerator.step, torch.get_rng_state().tolist()


def prepared_model(mesh: dict[str, Any]) -> tuple[Any, Any]:
    model, optimizer, _, _ = prepared(mesh, fresh())
    return model, optimizer.optimizer


@pytest.mark.nightly
def test_all_ranks_take_up_what_the_ranks_that_saved_counted(pool, tmp_path):
    """Accelerate's files are one for each rank: two of four find none."""
    pool.run(counts_batches, str(tmp_path), 3, DP2, world=2)
    found = pool.run(counts_batches, str(tmp_path), None, TP2DP2, world=4)
    assert [step for step, _ in found] == [3] * 4
    states = [state for _, state in found]
    assert states[0] == states[1] != states[2] == states[3]


def takes_up_an_unsharded_state(folder: str) -> None:
    if dist.get_rank() == 0:
        (Path(folder) / "optimizer.bin").write_bytes(b"")
    dist.barrier()
    accelerator = fresh()
    model = shardcore.shard(llama(), tp=2)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.load_state(folder)


def test_an_unsharded_state_is_refused(pool, tmp_path):
    with pytest.raises(Exception, match="models were not sharded") as caught:
        pool.run(takes_up_an_unsharded_state, str(tmp_path), world=2)
    assert {failure.error for failure in caught.value.failures} == {"CheckpointError"}
