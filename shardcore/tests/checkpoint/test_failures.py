"""A failure of one rank is an error on all of them, and leaves no checkpoint and no change."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from trainings import Training, largest, said

import shardcore
from shardcore.agree import store_barrier
from shardcore.checkpoint import folders
from shardcore.errors import AgreementError, CheckpointError, ConfigError, MissingRanksError, ShardcoreWarning
from shardcore_loop import ShardedDataLoader


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@contextlib.contextmanager
def full_disk():
    """Let parts be written to a device that is full."""
    stream = FileSystem.create_stream

    @contextlib.contextmanager
    def to_a_full_device(self, path, mode):
        with stream(self, "/dev/full" if str(path).endswith(".distcp") else path, mode) as file:
            yield file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", to_a_full_device)
        yield


class Archive:
    """As torch's: its end is written in any case, and is not where it was to be."""

    def __enter__(self):
        return self

    def __exit__(self, *failure):
        raise RuntimeError("unexpected pos 704 vs 598")


def test_an_error_of_the_file_system_is_told_through_that_of_an_archive():
    full = pytest.raises(CheckpointError, match=r"writing failed: OSError: .*No space left")
    with full, folders.telling("writing"), Archive():
        raise OSError(28, "No space left on device")
    with pytest.raises(RuntimeError, match="unexpected pos"), folders.telling("writing"), Archive():
        pass


def a_full_disk(folder, rank, asynchronous):
    training = Training({"tp": 2}, steps=1)
    training.save(folder, step=1)
    with full_disk() if dist.get_rank() == rank else contextlib.nullcontext():
        if asynchronous:
            training.save(folder, step=2, asynchronous=True)
            found = said(lambda: training.save(folder, step=3))
        else:
            found = said(lambda: training.save(folder, step=2))
    assert found[rank].startswith("CheckpointError: writing to ")
    assert "No space left on device" in found[rank]
    assert found[1 - rank].startswith(f"AgreementError: rank {rank} failed")
    assert "No space left on device" in found[1 - rank]
    dist.barrier()
    assert names(folder) == ["step-1"]
    assert training.load(folder).step == 1
    training.save(folder, step=2)  # and the ranks still go together
    assert training.load(folder).step == 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk(pool, tmp_path, rank, asynchronous):
    pool.run(a_full_disk, str(tmp_path), rank, asynchronous)


def a_read_only_folder(folder):
    training = Training({"tp": 2})
    found = said(lambda: training.save("/proc/checkpoints"))
    assert found[0].startswith("CheckpointError: making a folder for a checkpoint in /proc/checkpoints failed")
    assert found[1].startswith("AgreementError: rank 0 failed")
    real = folders.complete

    def refuse(*args):
        raise PermissionError(30, "Read-only file system")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folders, "write_json", refuse)
        found = said(lambda: training.save(folder))
    assert all("Read-only file system" in text for text in found)
    assert folders.complete is real
    assert names(folder) == []


def test_a_read_only_folder(pool, tmp_path):
    pool.run(a_read_only_folder, str(tmp_path))


def the_ranks_differ(folder):
    training, rank = Training({"tp": 2}, steps=1), dist.get_rank()
    found = said(lambda: training.save(folder, step=rank))
    assert "ranks 0 and 1 differ in the argument step: 0 on rank 0, 1 on rank 1" in found[0]
    training.optimizer.param_groups[0]["lr"] += rank
    found = said(lambda: training.save(folder))
    assert "differ in the options of the optimizer" in found[0]
    training.optimizer.param_groups[0]["lr"] -= rank
    found = said(lambda: training.save(folder, extra=training if rank == 0 else None))
    assert "extra is a trainings.Training, which cannot be stored" in found[0]
    assert found[1].startswith("AgreementError: rank 0 failed")
    found = said(lambda: training.save(folder if rank == 0 else f"{folder}/other"))
    assert "the argument folder" in found[1]
    assert names(folder) == []


def test_the_ranks_differ(pool, tmp_path):
    pool.run(the_ranks_differ, str(tmp_path))


def only_one_calls(folder):
    training, rank = Training({"tp": 2}), dist.get_rank()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_barrier, "limit_of_waiting", lambda: 0.5)
        for caller, call in ((0, training.save), (1, training.load)):
            if rank == caller:
                with pytest.raises(
                    MissingRanksError, match=f"called by all 2 ranks.* did not come: {1 - caller}"
                ) as caught:
                    call(folder)
                assert caught.value.missing == (1 - caller,)
            dist.barrier()
    assert names(folder) == []
    training.save(folder)
    assert training.load(folder).step == 0


def test_only_one_rank_calls(pool, tmp_path):
    pool.run(only_one_calls, str(tmp_path))


def parts_of_ones_own(folder):
    model = Training({"tp": 2}).model
    model.own = nn.Parameter(torch.full((2,), float(dist.get_rank())))
    found = said(lambda: shardcore.save_checkpoint(folder, model))
    assert "differ in the plain parameter model.own" in found[0]
    assert "has to hold it as a DTensor" in found[1]
    assert names(folder) == []


def test_plain_parts_are_not_taken_for_the_whole(pool, tmp_path):
    pool.run(parts_of_ones_own, str(tmp_path))


def a_folder_of_one_host(folder):
    training = Training({"tp": 2})
    real = Path.is_dir
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(Path, "is_dir", lambda path: ".tmp-" not in path.name and real(path))
        found = said(lambda: training.save(folder))
    assert "which rank 0 has made, cannot be seen on this rank" in found[1]
    assert names(folder) == []


def test_a_folder_that_is_not_shared(pool, tmp_path):
    pool.run(a_folder_of_one_host, str(tmp_path))


def nothing_is_changed(folder):
    saved = Training({"tp": 2}, steps=2)
    saved.save(folder)
    other = Training({"tp": 2}, seed=7, steps=1)
    before = other.values()
    for fails in (lambda: other.load(f"{folder}/step-5"), lambda: other.load(folder, loader=[])):
        said(fails)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(folders, "problem", lambda path: None)
            other.optimizer.param_groups[0]["params"].pop()
        found = said(lambda: other.load(folder))
    assert "other parameters" in found[1]
    assert found[0].startswith("AgreementError: rank 1 failed")
    assert all(torch.equal(value, before[name]) for name, value in other.values().items() if name in before)


def test_a_load_that_is_refused_changes_nothing(pool, tmp_path):
    pool.run(nothing_is_changed, str(tmp_path))


def a_damaged_part(folder):
    saved = Training({"tp": 2}, steps=1)
    saved.save(folder)
    if dist.get_rank() == 0:
        part = Path(folder, "step-0", "__1_0.distcp")
        part.write_bytes(bytes(part.stat().st_size))
    dist.barrier()
    found = said(lambda: saved.load(folder))
    assert "a part of" in found[1]
    assert "is damaged" in found[1]
    assert all("while the models were being changed" in text or text.startswith("Checkpoint") for text in found)


def test_a_damaged_part_of_the_right_size(pool, tmp_path):
    pool.run(a_damaged_part, str(tmp_path))


class Interrupted:
    """A schedule during which the user ends the process."""

    def state_dict(self):
        raise KeyboardInterrupt

    def load_state_dict(self, state):
        raise AssertionError


def an_interrupt(folder):
    training = Training({"tp": 2})
    if dist.get_rank() == 1:
        with pytest.raises(KeyboardInterrupt):
            shardcore.save_checkpoint(folder, training.model, scheduler=Interrupted())
    else:
        with pytest.raises(AgreementError, match=r"rank 1 failed, .* KeyboardInterrupt"):
            shardcore.save_checkpoint(folder, training.model, scheduler=training.schedule)
    assert names(folder) == []


def test_an_interrupt_of_one_rank_ends_the_others(pool, tmp_path):
    pool.run(an_interrupt, str(tmp_path))


class Model(nn.Module):
    def __init__(self, wide=4, dtype=torch.float32, **more):
        super().__init__()
        self.linear = nn.Linear(3, wide, dtype=dtype)
        for name, module in more.items():
            self.add_module(name, module)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Model(5), r"linear.weight has the shape \(4, 3\) there and \(5, 3\) here; linear.bias"),
        (Model(dtype=torch.bfloat16), "linear.weight is torch.float32 there and torch.bfloat16 here"),
        (Model(more=nn.Linear(2, 2)), "it lacks more.bias, more.weight, which the model has"),
        (nn.ModuleDict({"linear": nn.Linear(3, 4, bias=False)}), "it has linear.bias, which the model lacks"),
        (Model().to("meta"), "linear.weight is on the meta device"),
    ],
)
def test_another_model(tmp_path, model, words):
    shardcore.save_checkpoint(tmp_path, Model())
    with pytest.raises((CheckpointError, ConfigError), match=words):
        shardcore.load_checkpoint(tmp_path, model)


@pytest.mark.parametrize("what", ["optimizer", "scheduler", "loader"])
def test_what_was_not_saved(tmp_path, what):
    model = Model()
    shardcore.save_checkpoint(tmp_path, model)
    optimizer = torch.optim.SGD(model.parameters())
    given = {"optimizer": optimizer, "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    given["loader"] = ShardedDataLoader(torch.arange(4), replicas=1)
    with pytest.raises(CheckpointError, match=f"was saved without a {what}"):
        shardcore.load_checkpoint(tmp_path, model, **{what: given[what]})


def test_nothing_of_the_meta_device_is_saved(tmp_path):
    with pytest.raises(ConfigError, match="meta device"):
        shardcore.save_checkpoint(tmp_path, Model().to("meta"))
    assert names(tmp_path) == []


def test_the_broken_one_is_skipped_on_all_ranks(pool, tmp_path):
    pool.run(skips, str(tmp_path))


def skips(folder):
    training = Training({"tp": 2}, steps=1)
    training.save(folder, step=1)
    wanted = training.values()
    training.run([1])
    training.save(folder, step=2)
    if dist.get_rank() == 0:
        Path(folder, "step-2", "__1_0.distcp").unlink()
    dist.barrier()
    warns = pytest.warns(ShardcoreWarning, match="step-2.*__1_0") if dist.get_rank() == 0 else contextlib.nullcontext()
    with warns:
        assert training.load(folder).step == 1
    assert largest(training.values(), wanted) == 0
