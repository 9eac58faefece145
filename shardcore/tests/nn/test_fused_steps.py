"""Fused steps of optimizers over the parts of parameters; what they come to is tested beside other optimizers."""

from __future__ import annotations

import pytest
import torch
from tiny import batch, build, shard

from shardcore.nn import optimizers


def _stepped(mode):
    model = shard(build(), partial_gradients=mode)
    model(batch(), labels=batch()).backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()
    return [parameter.to_local() for parameter in model.parameters()]


def as_torch_does():
    for mode in ("in_backward", "deferred"):  # torch sums gradients that are partial still
        ours = _stepped(mode)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizers, "owns", lambda *tensors: False)
            theirs = _stepped(mode)
        assert all(map(torch.equal, ours, theirs)), mode


def test_the_numbers_are_those_of_torch(pool):
    pool.run(as_torch_does, world=2)
