"""Layers under torch.compile whose modules read weights of modules below them."""

from __future__ import annotations

import copy

import pytest
import torch

import shardcore
from shard_hybrids.cases import cases
from shardcore._torch import CAN_TRACE
from shardcore_testing.parity import assert_same_gradients

# Dynamo makes an internal error of a warning that is an error, and torch warns of its own doings while it traces.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.newest, pytest.mark.nightly]


def one_graph():
    torch._dynamo.reset()
    (case,) = (case for case in cases() if case.name == "lfm2_causal_lm")
    reference = case.build().double().eval()
    model = shardcore.shard(copy.deepcopy(reference), tp=2)
    for layer in model.model.layers:
        layer.compile(backend="aot_eager", fullgraph=True)
    for one in (reference, model):
        one(**case.inputs(one, 0)).loss.backward()
    assert_same_gradients(reference, model)


@pytest.mark.skipif(not CAN_TRACE, reason="before torch 2.13 graphs break where parameters are read")
def test_short_convolutions_are_one_graph(pool):
    pool.run(one_graph, world=2, timeout=100)
