"""The random stream of a sharded model follows torch's generator, as the draws of an unsharded model do."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build, shard

import shardcore

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


def seeds_in_other_ways():
    """Whatever puts torch's generator where it was repeats what was drawn; a model without dropout leaves it alone."""
    model, plain = shard(build(dropout=P)), shard(build())
    state = torch.get_rng_state()
    for seed in (lambda: torch.default_generator.manual_seed(3), lambda: torch.set_rng_state(state)):
        found = []
        for _ in range(2):
            seed()
            torch.rand(7)  # for a batch, say
            found.append((drawn(model), drawn(model), torch.rand(()).item()))
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]
    state = torch.get_rng_state()
    drawn(plain)
    drawn(model.eval())
    assert torch.equal(torch.get_rng_state(), state)


def test_other_ways_of_seeding(pool):
    pool.run(seeds_in_other_ways)


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
    """Seed torch on one rank, and draw there: no other rank waits, and the stream is still that of all ranks."""
    model = shard(build(dropout=P))
    found = []
    begin = time.monotonic()
    for rank in (0, 1, 0):
        if dist.get_rank() == rank:
            torch.manual_seed(5)
            torch.rand(3)
        found.append(drawn(model))
    assert time.monotonic() - begin < 5
    return found


def test_a_rank_that_is_seeded_alone(pool):
    first, second = pool.run(seeds_alone)
    assert first == second
    assert first[0] == first[2], "the first rank's generator is the one that counts"
    assert first[1] != first[0]


def says_it_to_the_model():
    model = shard(build(dropout=P))
    torch.manual_seed(5)
    shardcore.manual_seed(model, 11)
    first = [drawn(model) for _ in range(2)]
    shardcore.manual_seed(model, 11)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    again = [drawn(model) for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), state)
    return first, again


def test_what_is_said_to_the_model_holds(pool):
    for first, second in pool.run(says_it_to_the_model):
        assert first == second
