"""Loaders over the data axes: who sees what, and taking up a position again."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, build
from torch.utils.data import Dataset, IterableDataset

import shardcore
from shardcore.errors import AgreementError, ConfigError, NotSupportedError
from shardcore.mesh.context import context_of
from shardcore_loop import ShardedDataLoader


class Numbers(Dataset):
    """The numbers below ``count``, as floats; with noise, drawn from the generators of Python, numpy and torch."""

    def __init__(self, count=20, noise=False):
        self.count, self.noise = count, noise

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        extra = (random.random() + np.random.random() + torch.rand(()).item()) / 4 if self.noise else 0.0
        return index + extra


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


def _values(loader):
    return [batch.tolist() for batch in loader]


def _flat(batches):
    return [value for batch in batches for value in batch]


def test_replicas_divide_the_dataset():
    parts = [_values(ShardedDataLoader(Numbers(), replicas=2, replica=r, batch_size=3)) for r in (0, 1)]
    assert parts[0] == [[0, 2, 4], [6, 8, 10], [12, 14, 16], [18]]
    assert sorted(_flat(parts[0]) + _flat(parts[1])) == list(range(20))


def test_every_pass_is_the_next_epoch():
    loader = ShardedDataLoader(Numbers(), batch_size=4, shuffle=True, seed=3)
    first, second = _values(loader), _values(loader)
    assert first != second
    assert sorted(_flat(first)) == sorted(_flat(second)) == list(range(20))
    loader.set_epoch(0)
    assert _values(loader) == first
    assert len(loader) == 5
    other = ShardedDataLoader(Numbers(), batch_size=4, shuffle=True, seed=9)
    assert _values(other) not in (first, second)


def test_a_pass_that_was_left_begins_anew():
    loader = ShardedDataLoader(Numbers(), batch_size=4, shuffle=True)
    whole = _values(loader)
    loader.set_epoch(0)
    next(iter(loader))
    assert _values(loader) == whole


def test_one_of_several_ranks_has_to_know_the_replicas(monkeypatch):
    """Else all replicas would see the same samples."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"of one of 2 ranks .* use ShardedDataLoader.of\(model, dataset"):
        ShardedDataLoader(Numbers(), batch_size=4)
    assert len(_values(ShardedDataLoader(Numbers(), batch_size=4, replicas=1))) == 5


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_position_is_taken_up_again(workers, shuffle):
    options = {"batch_size": 2, "shuffle": shuffle, "num_workers": workers}
    loader = ShardedDataLoader(Numbers(), **options)
    _values(loader)
    expected = _values(loader)
    loader.set_epoch(1)
    seen = []
    for batch in loader:
        seen.append(batch.tolist())
        if len(seen) == 3:
            state = loader.state_dict()
            break
    again = ShardedDataLoader(Numbers(), **options)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert seen + _values(again) == expected
    assert again.state_dict()["epoch"] == 2
    assert len(_values(again)) == 10


def test_a_position_does_not_depend_on_the_number_of_replicas():
    loader = ShardedDataLoader(Numbers(24), replicas=2, replica=1, batch_size=3, shuffle=True)
    batches = iter(loader)
    next(batches), next(batches)
    state = loader.state_dict()
    assert state["samples"] == 12
    rest = []
    for replica in range(4):
        other = ShardedDataLoader(Numbers(24), replicas=4, replica=replica, batch_size=1, shuffle=True)
        other.load_state_dict(state)
        rest += _flat(_values(other))
    done = []
    for replica in range(2):
        begun = iter(ShardedDataLoader(Numbers(24), replicas=2, replica=replica, batch_size=3, shuffle=True))
        done += next(begun).tolist() + next(begun).tolist()
    assert sorted(done + rest) == list(range(24))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "the saved position has seed 0, and this loader 1"),
        ({"shuffle": True}, "the saved position has shuffle False, and this loader True"),
        ({"dataset": Numbers(21)}, "the saved position has samples_in_dataset 20, and this loader 21"),
        (
            {"batch_size": 4},
            (
                "the saved position lies after 3 samples, which are no whole batches of 4 on 1 replicas; use a batch "
                "size that divides them"
            ),
        ),
    ],
)
def test_positions_that_do_not_fit(change, message):
    loader = ShardedDataLoader(Numbers(), batch_size=3)
    next(iter(loader))
    other = ShardedDataLoader(**{"dataset": Numbers(), "batch_size": 3, **change})
    with pytest.raises(ConfigError) as caught:
        other.load_state_dict(loader.state_dict())
    assert str(caught.value) == message


def test_what_cannot_be_divided():
    with pytest.raises(NotSupportedError, match="Stream is an IterableDataset, which only its own code can divide"):
        ShardedDataLoader(Stream(), replicas=2)
    with pytest.raises(ConfigError, match="ShardedDataLoader makes the sampler itself"):
        ShardedDataLoader(Numbers(), sampler=[1, 2])
    with pytest.raises(ConfigError, match="in_order=False hands out batches as they are ready"):
        ShardedDataLoader(Numbers(), num_workers=2, in_order=False)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_datasets_randomness_is_its_own(workers):
    def run(seed, replica=0, epoch=0):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        loader = ShardedDataLoader(
            Numbers(8, noise=True), replica=replica, replicas=2, batch_size=2, num_workers=workers
        )
        loader.set_epoch(epoch)
        values = _flat(_values(loader))
        return [value % 1 for value in values], (random.random(), np.random.random(), float(torch.rand(())))

    (one, after), (two, _) = run(1), run(2)
    assert one == two  # however the ranks are seeded
    assert len(set(one)) == 4
    assert run(1, replica=1)[0] != one
    assert run(1, epoch=1)[0] != one
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    if not workers:
        assert after == (random.random(), np.random.random(), float(torch.rand(())))


def shared(tp, dp):
    model = shardcore.shard(build(), policy=TinyPolicy, tp=tp, dp=dp)
    torch.manual_seed(dist.get_rank())
    loader = ShardedDataLoader.of(model, Numbers(10, noise=True), batch_size=2, shuffle=True)
    mine, replica = _values(loader), context_of(model).replica
    everybody = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (replica, mine))
    for other, values in everybody:
        assert (values == mine) == (replica == other)
    assert loader.sampler.num_replicas == dp == len({other for other, _ in everybody})
    seen = [int(v) for replica in range(dp) for v in _flat(next(b for r, b in everybody if r == replica))]
    assert set(seen) == set(range(10))


def test_ranks_of_one_replica_get_the_same(pool):
    pool.run(shared, 2, 2, world=4)
    pool.run(shared, 2, 1, world=2)


def differing():
    model, rank = shardcore.shard(build(), policy=TinyPolicy, tp=2), dist.get_rank()
    for arguments, message in (
        ({"seed": rank}, r"ranks 0 and 1 differ in the loader's seed: 0 on rank 0, 1 on rank 1"),
        ({"batch_size": 1 + rank}, r"differ in the loader's batch_size"),
        ({"dataset": Numbers(10 + rank)}, "differ in the loader's samples_in_dataset: 10 on rank 0, 11 on rank 1"),
    ):
        with pytest.raises(AgreementError, match=message):
            ShardedDataLoader.of(model, **{"dataset": Numbers(10), **arguments})
    with pytest.raises(AgreementError if rank else NotSupportedError, match="only its own code can divide"):
        ShardedDataLoader.of(model, Numbers(10) if rank else Stream())


def test_ranks_that_would_see_other_samples(pool):
    pool.run(differing, world=2)


def unknown():
    pair = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        model = shardcore.shard(build(), policy=TinyPolicy, tensor_parallel_process_group=pair)
        with pytest.raises(ConfigError, match=r"the 4 ranks are not all on this mesh \(2\), and nothing says which"):
            ShardedDataLoader.of(model, Numbers())
    with pytest.raises(ConfigError, match=r"the 4 ranks are not all on this mesh \(1\)"):
        ShardedDataLoader.of(None, Numbers())


def test_replicas_that_nobody_knows(pool):
    pool.run(unknown, world=4)


def test_a_loader_of_one_rank():
    model = build()
    with pytest.raises(ConfigError, match="got a TinyLM that was not sharded"):
        ShardedDataLoader.of(model, Numbers())
    model = shardcore.shard(model, policy=TinyPolicy)
    options = {"batch_size": 3, "shuffle": True, "seed": 3, "drop_last": True, "collate_fn": tuple}
    for place in (model, None):
        assert list(ShardedDataLoader.of(place, Numbers(), **options)) == list(ShardedDataLoader(Numbers(), **options))


@pytest.mark.parametrize("workers", [0, 2])
def test_two_passes_at_once(workers):
    options = {"batch_size": 2, "num_workers": workers}
    alone = _values(ShardedDataLoader(Numbers(8, noise=True), **options))
    loader = ShardedDataLoader(Numbers(8, noise=True), **options)
    pairs = [(one.tolist(), two.tolist()) for one, two in zip(loader, loader, strict=True)]
    assert [list(side) for side in zip(*pairs, strict=True)] == [alone, alone]


def test_a_jump_leaves_the_position_behind():
    loader = ShardedDataLoader(Numbers(), batch_size=4)
    next(iter(loader))
    state = loader.state_dict()
    for epoch, first in ((0, 4), (5, 0)):
        again = ShardedDataLoader(Numbers(), batch_size=4)
        again.load_state_dict(state)
        again.set_epoch(epoch)
        assert (again.state_dict()["epoch"], again.state_dict()["samples"]) == (epoch, first)
        assert _flat(_values(again)) == list(range(first, 20))


@pytest.mark.parametrize("batch_size", [3, 2, 8])
def test_an_epoch_that_ended_has_ended_at_any_batch_size(batch_size):
    loader = ShardedDataLoader(Numbers(7), batch_size=3)
    states = [loader.state_dict() for _ in loader]
    again = ShardedDataLoader(Numbers(7), batch_size=batch_size)
    again.load_state_dict(states[-1])
    assert _values(again) == []
    assert _flat(_values(again)) == list(range(7))
    assert again.state_dict()["epoch"] == 2


def test_workers_go_on_with_other_random_numbers():
    options = {"batch_size": 2, "num_workers": 1}
    loader = ShardedDataLoader(Numbers(8, noise=True), **options)
    batches = iter(loader)
    begin = [value % 1 for value in next(batches).tolist()]
    again = ShardedDataLoader(Numbers(8, noise=True), **options)
    again.load_state_dict(loader.state_dict())
    assert [value % 1 for value in _values(again)[0]] != pytest.approx(begin, abs=1e-3)


def test_nothing_and_less_than_a_batch():
    assert _values(ShardedDataLoader(Numbers(0), replicas=2, shuffle=True)) == []
    assert _values(ShardedDataLoader(Numbers(3), replicas=2, replica=1, batch_size=8)) == [[1, 0]]
    assert _values(ShardedDataLoader(Numbers(3), replicas=2, batch_size=8, drop_last=True)) == []
    # Left out, not repeated: 6 and then 0 would make a second batch.
    assert _values(ShardedDataLoader(Numbers(7), replicas=2, replica=1, batch_size=2, drop_last=True)) == [[1, 3]]
    single = ShardedDataLoader(Numbers(5), replicas=2, batch_size=None)
    batches = iter(single)
    assert [next(batches), next(batches)] == [0, 2]
    assert single.state_dict()["samples"] == 4
