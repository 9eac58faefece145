"""Regions outside of their fused path: every node computes its own gradient, and the numbers are the same."""

from __future__ import annotations

import copy

import pytest
import token_net
import torch

import shardcore
from shardcore.mesh.context import context_of
from shardcore.nn.region.inner import _EnteredLinear
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients


def nodes(tensor: torch.Tensor) -> set[str]:
    """Return the names of all nodes in the graph of a tensor."""
    seen, queue = set(), [tensor.grad_fn]
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue += [following for following, _ in node.next_functions]
    return {type(node).__name__ for node in seen}


def trained(sequence: bool) -> dict[bool, dict[str, int]]:
    torch.manual_seed(0)
    native = token_net.Model().double()
    ids = torch.arange(10).view(2, 5)
    counted = {}
    for fuses in (True, False):
        reference = copy.deepcopy(native)
        model = copy.deepcopy(native)
        shardcore.shard(model, policy=token_net.ModelPolicy, tp=2, enable_sequence_parallelism=sequence)
        # The modules hold the context itself.
        object.__setattr__(context_of(model), "fuses_regions", fuses)
        with Collectives() as counter:
            out = model(ids)
            assert (f"{_EnteredLinear.__name__}Backward" in nodes(out)) is fuses
            out.square().sum().backward()
        counted[fuses] = dict(counter.counts)
        wanted = reference(ids)
        wanted.square().sum().backward()
        assert_close(out, wanted, "the output")
        assert_same_gradients(reference, model)
    return counted


@pytest.mark.parametrize("sequence", [False, True])
def test_the_context_chooses_the_path_and_numbers_do_not_change(pool, sequence):
    for counted in pool.run(trained, sequence, world=2):
        assert sum(counted[True].values()) == sum(counted[False].values()) > 0
