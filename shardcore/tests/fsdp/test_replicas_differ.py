"""Replicas that run other blocks than each other, or the same ones in another order."""

from __future__ import annotations

import re

import pytest
import torch
from tiny import TinyPolicy, batch, build

import shardcore
from shardcore.agree.store_barrier import StoreBarrier
from shardcore.errors import AgreementError
from shardcore.fsdp.units import unit_of
from shardcore.mesh.context import context_of


def _made(**sizes):
    model = shardcore.shard(build(), policy=TinyPolicy, tp=1, **sizes)
    return model, context_of(model).replica, model.model.embed(batch(rows=2)).detach().requires_grad_()


def _in_order(layers, x):
    for layer in layers:
        x = layer(x)
    return x.sum()


def _refused(step, first, second):
    about = f"rank 0 is about to run the {first}, and rank 1 the {second}. Replicas gather"
    with pytest.raises(AgreementError, match=re.escape(about)):
        step()


def another_order():
    model, replica, x = _made(dp=2)
    layers = list(model.model.layers)
    order = [layers, layers[::-1]][replica]
    # Blocks have as many elements, so that each replica would compute with parameters of the other block.
    with torch.no_grad():
        _refused(lambda: _in_order(order, x), "forward of model.layers.0", "forward of model.layers.1")


def another_order_of_whole_replicas():
    model, replica, x = _made(dp_replicate_size=2)
    layers = list(model.model.layers)
    with torch.no_grad():
        for _ in range(1 + replica):  # nothing is sent, so that one replica may do more
            _in_order(layers, x)
    loss = _in_order([layers, layers[::-1]][replica], x)
    _refused(loss.backward, "backward of model.layers.1", "backward of model.layers.0")


def a_block_left_out():
    model, replica, x = _made(dp=2)
    own = list(model.model.layers)[: 2 - replica]
    _refused(lambda: _in_order(own, x).backward(), "forward of model.layers.1", "backward of model.layers.0")


def only_what_is_sent_is_compared():
    met = []
    wait = StoreBarrier.wait
    StoreBarrier.wait = lambda *args, **kw: met.append(args[1]["about"]) or wait(*args, **kw)
    try:
        model, replica, _ = _made(dp_replicate_size=2)
        ids = batch(rows=2)
        model.set_requires_gradient_sync(False)
        for _ in range(1 + replica):
            model(ids, labels=ids).backward()
        assert met == []
        model.set_requires_gradient_sync(True)
        for _ in range(4):
            model(ids, labels=ids).backward()
        blocks = ["what is in no block", "model.layers.1", "model.layers.0"]
        assert met == [f"the backward of {block}" for block in blocks] * 2
        assert unit_of(model).meet is None  # nothing is left of it in later steps
    finally:
        StoreBarrier.wait = wait


@pytest.mark.parametrize(
    "body", [another_order, another_order_of_whole_replicas, a_block_left_out, only_what_is_sent_is_compared]
)
def test_replicas_that_differ(body, pool):
    pool.run(body, world=2)
