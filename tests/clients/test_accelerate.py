"""Accelerate with sharded models: its loops train, count and export as they do with the unsharded model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import shardcore

pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).parent / "support"))

from loops_by_accelerate import fresh, loop, prepared  # from support/

from trainings_by_clients import llama, parameters, words  # from support/

TP2 = {"tp": 2}
DP2 = {"tp": 1, "dp": 2}
TP2DP2 = {"tp": 2, "dp": 2}
MESHES = [TP2, DP2, TP2DP2]


pytestmark = pytest.mark.usefixtures("float64_throughout")


def ranks(mesh: dict[str, Any]) -> int:
    return mesh["tp"] * mesh.get("dp", 1)


def trains(mesh: dict[str, Any] | None, more: dict[str, Any]) -> tuple[Any, ...]:
    accelerator = fresh(gradient_accumulation_steps=2)
    model, optimizer, loader, scheduler = prepared(mesh, accelerator, **more)
    said = loop(accelerator, model, optimizer, loader, scheduler)
    return said, parameters(model), accelerator.num_processes, accelerator.is_main_process


@pytest.mark.parametrize("more", [{}, {"enable_sequence_parallelism": True, "partial_gradients": "deferred"}], ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_trains_as_unsharded(pool, mesh, more):
    if more and mesh == DP2:
        pytest.skip("nothing is partial without tensor parallelism")
    ((wanted, values, _, _),) = pool.run(trains, None, {}, world=1)
    for rank, (said, got, processes, is_main) in enumerate(pool.run(trains, mesh, more, world=ranks(mesh))):
        assert processes == mesh.get("dp", 1)
        assert is_main == (rank == 0)
        for mine, other in zip(said, wanted, strict=True):
            assert mine == pytest.approx(other, rel=1e-9)
        for name, value in values.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9)


def compiles(mesh: dict[str, Any] | None) -> tuple[Any, ...]:
    accelerator = fresh(gradient_accumulation_steps=2, dynamo_backend="aot_eager" if mesh else None)
    model, optimizer, loader, scheduler = prepared(mesh, accelerator)
    said = loop(accelerator, model, optimizer, loader, scheduler)
    return said, parameters(accelerator.unwrap_model(model, keep_torch_compile=False)), hasattr(model, "_orig_mod")


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler of torch before 2.14
def test_trains_compiled(pool):
    ((wanted, values, _),) = pool.run(compiles, None, world=1)
    for said, got, is_compiled in pool.run(compiles, TP2, world=2):
        assert is_compiled
        for mine, other in zip(said, wanted, strict=True):
            assert mine == pytest.approx(other, rel=1e-9)
        for name, value in values.items():
            torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-9)


def counts(mesh: dict[str, Any]) -> dict[str, Any]:
    accelerator = fresh()
    model = shardcore.shard(llama(), **mesh)
    loader = DataLoader(words(10), batch_size=2)
    model, loader = accelerator.prepare(model, loader)
    rows, objects, logits = [], [], []
    for batch in loader:
        rows += accelerator.gather_for_metrics(batch["input_ids"]).tolist()
        objects += accelerator.gather_for_metrics([f"row {n}" for n in batch["input_ids"][:, 0].tolist()])
        with torch.no_grad():
            logits.append(accelerator.gather_for_metrics(model(**batch).logits))
    number = torch.tensor(float(accelerator.process_index + 1))
    ragged = torch.ones(2, 3 + accelerator.process_index)
    with accelerator.split_between_processes([1, 2, 3, 4]) as part:
        split = list(part)
    if dist.get_rank() == dist.get_world_size() - 1:
        accelerator.set_trigger()
    return {
        "rows": rows,
        "objects": objects,
        "logits": torch.cat(logits).shape[0],
        "sum": float(accelerator.reduce(number)),
        "mean": float(accelerator.reduce(number, "mean")),
        "padded": list(accelerator.pad_across_processes(ragged, dim=1).shape),
        "gathered": accelerator.gather(number).tolist(),
        "split": split,
        "index": accelerator.process_index,
        "triggered": (accelerator.check_trigger(), accelerator.check_trigger()),
    }


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_counts_each_row_and_each_replica_once(pool, mesh):
    replicas = mesh.get("dp", 1)
    ids = words(10).columns["input_ids"]
    for rank, found in enumerate(pool.run(counts, mesh, world=ranks(mesh))):
        assert found["index"] == rank // mesh["tp"]
        assert found["rows"] == ids.tolist()
        assert found["objects"] == [f"row {n}" for n in ids[:, 0].tolist()]
        assert found["logits"] == 10
        assert found["sum"] == sum(range(1, replicas + 1))
        assert found["mean"] == found["sum"] / replicas
        assert found["gathered"] == [float(n) for n in range(1, replicas + 1)]
        assert found["padded"] == [2, 2 + replicas]
        assert found["split"] == ([1, 2, 3, 4] if replicas == 1 else [[1, 2], [3, 4]][found["index"]])
        assert found["triggered"] == (True, False)


def seeded_apart(mesh: dict[str, Any]) -> list[list[int]]:
    """The batches of two passes on ranks whose generators differ, with rows that are drawn when they are read."""
    accelerator = fresh()
    model = shardcore.shard(llama(), **mesh)
    torch.manual_seed(100 + dist.get_rank())

    class Drawn(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, at):
            return torch.tensor([at, int(torch.randint(1000, ()))])

    model, loader = accelerator.prepare(model, DataLoader(Drawn(), batch_size=2, shuffle=True))
    return [row for _ in range(2) for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize("mesh", [TP2, TP2DP2], ids=str)
def test_ranks_of_a_replica_get_the_same_batches_however_they_are_seeded(pool, mesh):
    found = pool.run(seeded_apart, mesh, world=ranks(mesh))
    for first in range(0, len(found), 2):
        assert found[first] == found[first + 1]
    assert sorted(row[0] for rows in found[::2] for row in rows) == sorted(list(range(8)) * 2)


# Saving


def exports(folder: str, mesh: dict[str, Any]) -> list[int]:
    accelerator = fresh()
    model = accelerator.prepare(shardcore.shard(llama(), **mesh))
    accelerator.save_model(model, f"{folder}/saved")
    # As the examples of transformers have it.
    accelerator.unwrap_model(model).save_pretrained(
        f"{folder}/given",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.unwrap_model(model).save_pretrained(f"{folder}/own", is_main_process=accelerator.is_main_process)
    accelerator.wait_for_everyone()
    return [len(accelerator.get_state_dict(model))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_exports_are_those_of_the_unsharded_model(pool, tmp_path, mesh):
    from safetensors.torch import load_file

    whole = dict(llama().state_dict())
    pool.run(exports, str(tmp_path), mesh, world=ranks(mesh))
    for name in ("saved", "given", "own"):
        found = load_file(tmp_path / name / "model.safetensors")
        assert found.keys() == whole.keys()
        for key, value in found.items():
            torch.testing.assert_close(value, whole[key], rtol=0, atol=0)


# What is refused


def plain(cpu: bool) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    model = shardcore.shard(llama(), tp=2)
    optimizer = torch.optim.AdamW(model.parameters())
    Accelerator(cpu=cpu).prepare(model, optimizer)


@pytest.mark.parametrize("cpu", [False, True])
def test_an_accelerator_that_knows_no_sharded_models_is_refused_by_all_ranks(pool, cpu):
    with pytest.raises(Exception, match=r"shardcore_trainer\.accelerate") as caught:
        pool.run(plain, cpu, world=2)
    assert len(caught.value.failures) == 2


def plain_loader() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    model = shardcore.shard(llama(), tp=2)
    fresh().adopt(model)  # tells Accelerate's state which ranks there are, as a launcher does where there are devices
    for batch in Accelerator().prepare(DataLoader(words(8), batch_size=2)):
        model(**batch)


def test_a_loader_that_knows_no_sharded_models_is_found_by_its_batches(pool):
    with pytest.raises(Exception, match="input_ids") as caught:
        pool.run(plain_loader, world=2)
    assert [failure.error for failure in caught.value.failures] == ["AgreementError", "AgreementError"]


def loader_first() -> None:
    fresh().prepare(DataLoader(words(8), batch_size=2))


def test_a_loader_before_the_model_is_refused(pool):
    with pytest.raises(Exception, match="a loader was prepared before the model") as caught:
        pool.run(loader_first, world=2)
    assert len(caught.value.failures) == 2


def dispatches() -> None:
    accelerator = fresh()
    accelerator.dataloader_config.dispatch_batches = True
    accelerator.prepare(shardcore.shard(llama(), tp=2), DataLoader(words(8), batch_size=2))


def test_one_rank_that_reads_for_all_is_refused(pool):
    with pytest.raises(Exception, match="dispatch_batches=True lets one rank read for all"):
        pool.run(dispatches, world=2)
