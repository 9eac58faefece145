"""A rank that calls a watched model alone gets an error in seconds; one that is late is waited for."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build, shard, twins

import shardcore
import shardcore_debug
from shardcore import ConfigError
from shardcore_testing.parity import assert_close


def watched(seconds: float, **fields):
    reference = build()
    model = shardcore.shard(build(), policy=TinyPolicy(), **fields)
    shardcore_debug.watch(model, seconds)
    for step in range(5):
        assert_close(reference(batch(step)), model(batch(step)), "a call that all make")
        model(batch(step)).sum().backward()
    return reference, model


def is_late():
    reference, model = watched(20.0, tp=2)
    if dist.get_rank() == 1:
        time.sleep(0.5)
    assert_close(reference(batch()), model(batch()), "a call that one makes late")
    return type(model).__name__


def test_a_rank_that_is_late_is_waited_for(pool):
    assert pool.run(is_late, world=2) == ["TinyLM"] * 2


def calls_alone(fields, lone):
    _, model = watched(1.0, **fields)
    begin = time.monotonic()
    try:
        if dist.get_rank() == lone:
            with torch.no_grad():
                model(batch())
        else:
            time.sleep(3.0)  # and so on, if nothing ends the job
    finally:
        assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("fields", "lone"),
    [
        ({"tp": 2}, 0),
        pytest.param({"tp": 2}, 1, marks=pytest.mark.nightly),
        pytest.param({"tp": 1, "dp": 2}, 0, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_rank_that_calls_alone_is_told_in_seconds(pool, fields, lone):
    said = f"called by ranks 0, 1 together, and these did not come within 1 s: {1 - lone}"
    with pytest.raises(Exception, match=said) as caught:
        pool.run(calls_alone, fields, lone, world=2)
    assert [(failure.rank, failure.error) for failure in caught.value.failures] == [(lone, "MissingRanksError")]


def copies():
    """They need nobody in a forward."""
    reference, model = watched(1.0, tp=1, dp_replicate_size=2)
    with torch.no_grad():
        if dist.get_rank() == 0:
            assert_close(reference(batch()), model(batch()), "a call of one copy")


def test_a_whole_copy_may_be_called_alone(pool):
    pool.run(copies, world=2)


def refused():
    with pytest.raises(ConfigError, match=r"that shard\(\) has returned"):
        shardcore_debug.watch(build())


def test_what_is_watched(pool):
    pool.run(refused, world=2)
    model = shard(twins(fields={"tp": 1})[0], tp=1)
    with pytest.raises(ConfigError, match="more than 0"):
        shardcore_debug.watch(model, 0)
    shardcore_debug.watch(model)
    assert "_watched_ranks" not in model.__dict__
