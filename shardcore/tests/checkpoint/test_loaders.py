"""The position in the data: taken up by any number of replicas, or by as many as before where only a loader knows."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from trainings import Training

import shardcore
from shardcore.errors import CheckpointError
from shardcore.mesh.context import context_of
from shardcore_loop import ShardedDataLoader


def loader_of(training, **options):
    context = context_of(training.model)
    place = {"replicas": 1} if context is None else {"replicas": context.sizes.replicas, "replica": context.replica}
    return ShardedDataLoader(torch.arange(48), shuffle=True, **{"batch_size": 2, **place, **options})


def seen(loader, batches, everywhere=True):
    """Return the samples of the next batches on all replicas, in the order in which they are trained."""
    own = [batch.tolist() for _, batch in zip(range(batches), loader, strict=False)]
    found = [own]
    if everywhere and dist.is_initialized():
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
    return [sorted({sample for rank in found for sample in rank[at]}) for at in range(len(own))]


def positions(folder):
    first = Training({"tp": 1, "dp": 2})
    loader = loader_of(first)
    seen(loader, 2)
    first.save(folder, loader=loader)
    wanted = seen(loader_from(folder, {"tp": 1, "dp": 2}), 6)
    assert sum(map(len, wanted)) == 24
    one = seen(loader_from(folder, {"tp": 2}, batch_size=4), 6)
    assert one == wanted
    assert seen(loader_from(folder, None, batch_size=4), 6) == wanted


def loader_from(folder, fields, **options):
    training = Training(fields, seed=7)
    loader = loader_of(training, **options)
    training.load(folder, loader=loader)
    return loader


def test_another_number_of_replicas(pool, tmp_path):
    pool.run(positions, str(tmp_path))


class Own:
    """A loader whose state means something to itself alone, as torchdata's."""

    def __init__(self, state=None):
        self.state = state

    def state_dict(self):
        return {"_snapshot": self.state, "workers": {0: (1, 2)}}

    def load_state_dict(self, state):
        assert state["workers"] == {0: (1, 2)}
        self.state = state["_snapshot"]


def of_each_replica(folder):
    rank = dist.get_rank()
    two, one = {"tp": 1, "dp": 2}, {"tp": 2}
    Training(two).save(f"{folder}/two", loader=Own(f"of {rank}"))
    Training(one).save(f"{folder}/one", loader=Own("of all"))
    loader = Own()
    Training(two, seed=7).load(f"{folder}/two", loader=loader)
    assert loader.state == f"of {rank}"
    other = Training(one, seed=7)
    before = other.values()
    with pytest.raises(CheckpointError, match="a position of the loader for each of 2 replicas"):
        other.load(f"{folder}/two", loader=loader)
    assert all(torch.equal(value, before[name]) for name, value in other.values().items())
    other.load(f"{folder}/two")  # without it
    Training(two).load(f"{folder}/one", loader=loader)  # all ranks had the same
    assert loader.state == "of all"


def test_a_loader_of_somebody_else(pool, tmp_path):
    pool.run(of_each_replica, str(tmp_path))


def test_a_position_that_is_refused_changes_nothing(tmp_path):
    training = Training(None, steps=1)
    training.save(tmp_path, loader=loader_of(training))
    other = Training(None, seed=7)
    before = other.values()
    with pytest.raises(shardcore.ConfigError, match="the saved position has seed 0"):
        other.load(tmp_path, loader=loader_of(other, seed=4))
    assert all(torch.equal(value, before[name]) for name, value in other.values().items())
