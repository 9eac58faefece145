"""Ranks that see a shared folder differently at one instant do the same all the same."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from trainings import Training, largest, said

import shardcore
from shardcore.checkpoint import folders
from shardcore.errors import AgreementError, CheckpointError, ShardcoreWarning


@contextlib.contextmanager
def seeing(rank, up_to):
    """Show ``rank`` no checkpoint beyond the step ``up_to``, as a file system that lags behind may."""
    native = folders._entries
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == rank:
            patch.setattr(folders, "_entries", lambda folder: [each for each in native(folder) if each[0] <= up_to])
        yield


def lagging(folder, rank):
    training = Training({"tp": 2})
    with seeing(rank, -1):
        assert training.load(f"{folder}/none", missing_ok=True) is None
    for step in (1, 2):
        training.run([step]).save(folder, step=step)
    newest, other = training.values(), Training({"tp": 2}, seed=1)
    with seeing(rank, 1):
        loaded = other.load(folder, missing_ok=True)
    assert loaded.step == (1 if rank == 0 else 2)  # the first rank has chosen
    if rank == 1:
        assert largest(other.values(), newest) == 0
    with seeing(rank, -1):
        loaded = other.load(folder, missing_ok=True)
    assert (loaded is None) == (rank == 0)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_sees_an_older_folder(pool, tmp_path, rank):
    pool.run(lagging, str(tmp_path), rank)


def unseen(folder):
    training, other = Training({"tp": 2}, steps=1), Training({"tp": 2}, seed=1)
    path = training.save(folder, step=1)
    before, native = other.values(), folders.problem
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(folders, "problem", lambda at: "there is no such folder" if at == path else native(at))
        found = said(lambda: other.load(folder, missing_ok=True))
    assert found[0].startswith("AgreementError: rank 1 failed, so no rank was changed.")
    assert "there is no such folder" in found[1]
    assert largest(other.values(), before) == 0


def test_one_rank_does_not_see_what_was_chosen(pool, tmp_path):
    pool.run(unseen, str(tmp_path))


def differing(folder):
    with pytest.raises(AgreementError, match="differ in the argument missing_ok: True on rank 0, False on rank 1"):
        Training({"tp": 2}).load(folder, missing_ok=dist.get_rank() == 0)
    with pytest.raises((AgreementError, CheckpointError), match=r"holds no complete checkpoint.*missing_ok=True"):
        Training({"tp": 2}).load(folder)


def test_ranks_that_want_something_else(pool, tmp_path):
    pool.run(differing, str(tmp_path))


def test_only_what_is_not_there_may_be_missing(tmp_path):
    model = torch.nn.Linear(3, 2)
    assert shardcore.load_checkpoint(tmp_path / "none", model, missing_ok=True) is None
    with pytest.raises(CheckpointError, match="there is no such folder"):
        shardcore.load_checkpoint(tmp_path / "step-3", model, missing_ok=True)  # asked for by name
    (shardcore.save_checkpoint(tmp_path, model, step=1) / "shardcore.json").unlink()
    with pytest.warns(ShardcoreWarning, match="was skipped"):
        assert shardcore.load_checkpoint(tmp_path, model, missing_ok=True) is None
    shardcore.save_checkpoint(tmp_path, model, step=2)
    assert shardcore.load_checkpoint(tmp_path, model, missing_ok=True).step == 2
    with pytest.raises(CheckpointError, match="not one of this model"):
        shardcore.load_checkpoint(tmp_path, torch.nn.Linear(3, 3), missing_ok=True)


class Position:
    def __init__(self, at):
        self.at = at

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def on_a_mesh_in_another_order(folder):
    mesh = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("dp_shard", "tp"))
    training, own = Training({"device_mesh": mesh}), Position(dist.get_rank() % 2)  # of the replica
    training.save(folder, loader=own)
    other = Position(None)
    training.load(folder, loader=other)
    return own.at, other.at


def test_ranks_find_their_own_files_on_a_mesh_in_another_order(pool, tmp_path):
    assert pool.run(on_a_mesh_in_another_order, str(tmp_path), world=4) == [(0, 0), (1, 1)] * 2
