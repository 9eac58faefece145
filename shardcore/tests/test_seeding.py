"""Seeding torch restarts the random stream of sharded models, on all ranks alike."""

from __future__ import annotations

import pickle

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build, shard

import shardcore
from shardcore.apply import judging
from shardcore.errors import ShardcoreWarning
from shardcore.mesh.seeding import install, times_seeded

P = 0.5


def drawn(model):
    """Return a number that depends on which elements the dropouts of a call dropped."""
    return model(batch(), labels=batch().roll(1, 1)).item()


def losses_of_seeds(of_rank):
    """Return what a model draws after torch was seeded, by seed; ``of_rank`` is added to the seed on each rank."""
    model = shard(build(dropout=P))
    found = []
    for seed in (5, 6, 5):
        torch.manual_seed(seed + of_rank * dist.get_rank())
        found.append([drawn(model) for _ in range(2)])
    return found, shardcore.get_rng_state(model)["cpu"].tolist()


@pytest.mark.parametrize("of_rank", [0, 100])
def test_seeding_torch_restarts_the_stream(pool, of_rank):
    first, second = pool.run(losses_of_seeds, of_rank)
    assert first == second, "masks agree, whatever seed each rank has"
    (five, six, again), _ = first
    assert five == again
    assert five != six
    assert five[0] != five[1]


def seeds_replicas():
    model = shardcore.shard(build(dropout=P), policy=TinyPolicy, tp=1, dp=2)
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        found.append(drawn(model))
    return found


def test_replicas_draw_other_numbers_from_one_seed(pool):
    first, second = pool.run(seeds_replicas)
    assert first[0] == first[1]
    assert second[0] == second[1]
    assert first != second


def seeds_alone():
    """Seed torch on one rank only: it waits, and says so, and the stream is still that of all ranks."""
    model = shard(build(dropout=P))
    drawn(model)
    soon, judging._SOON = judging._SOON, 0.3
    try:
        if dist.get_rank() == 0:
            torch.manual_seed(5)
            with pytest.warns(ShardcoreWarning, match=r"was seeded on this rank, and not, .* model: 1\. The random"):
                return drawn(model)
        return drawn(model)
    finally:
        judging._SOON = soon


def test_a_rank_that_is_seeded_alone_goes_on(pool):
    first, second = pool.run(seeds_alone)
    assert first == second


def says_it_to_the_model():
    model = shard(build(dropout=P))
    torch.manual_seed(5)
    shardcore.manual_seed(model, 11)
    first = drawn(model)
    torch.manual_seed(7)
    shardcore.manual_seed(model, 11)
    return first, drawn(model)


def test_what_is_said_to_the_model_holds(pool):
    for first, second in pool.run(says_it_to_the_model):
        assert first == second


def test_the_seeding_function_is_still_torchs():
    install()
    before = times_seeded()
    assert torch.manual_seed(3) is torch.default_generator
    assert torch.initial_seed() == 3
    assert times_seeded() == before + 1
    assert torch.manual_seed is torch.random.manual_seed
    assert pickle.loads(pickle.dumps(torch.manual_seed)) is torch.manual_seed
