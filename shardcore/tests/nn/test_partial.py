"""Partial gradients that nobody summed before an optimizer's step."""

from __future__ import annotations

import gc

import pytest
import torch
from tiny import batch, twins
from torch import nn

import shardcore
from shardcore.errors import NotSupportedError
from shardcore.nn import partial
from shardcore_testing.parity import assert_close, assert_same_parameters

CLIP = 0.05
DEFERRED = {"partial_gradients": "deferred"}


def _train(models, *, sums):
    """Two clipped steps side by side."""
    made = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for step in range(2):
        ids = batch(step)
        for model in models:
            model(ids, labels=ids.roll(1, 1)).backward()
        if sums:
            shardcore.reduce_partial_gradients(models[1])
        norms = [nn.utils.clip_grad_norm_(m.parameters(), CLIP) for m in models]
        assert norms[0] > CLIP
        assert_close(norms[0], norms[1], "norm")
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(*models)


def forgotten():
    _train(twins(fields=DEFERRED), sums=False)


@pytest.mark.skipif(not partial.SCALES_PARTIAL, reason="before torch 2.13 they are refused, which is tested below")
def test_forgetting_costs_no_correctness(pool):
    pool.run(forgotten, world=2)


def refused():
    scales, partial.SCALES_PARTIAL = partial.SCALES_PARTIAL, False
    try:
        models = twins(fields=DEFERRED)
    finally:
        partial.SCALES_PARTIAL = scales
    ids = batch()
    optimizer = torch.optim.SGD(models[1].parameters(), lr=1e-2)
    before = [p.detach().clone() for p in models[1].parameters()]
    models[1](ids, labels=ids).backward()
    with pytest.raises(NotSupportedError, match=r"SGD\.step with a partial gradient of \S+, which torch \S+ would"):
        optimizer.step()
    for old, parameter in zip(before, models[1].parameters(), strict=True):
        assert torch.equal(old.to_local(), parameter.to_local())
    others = nn.Linear(2, 2)
    others(torch.ones(2)).sum().backward()
    torch.optim.SGD(others.parameters()).step()
    optimizer.zero_grad()
    _train(models, sums=True)
    # A model that is gone stops no optimizer.
    models[1](ids, labels=ids).backward()
    del models
    gc.collect()
    torch.optim.SGD(others.parameters()).step()


def test_where_torch_clips_them_wrongly_a_step_is_refused(pool):
    pool.run(refused, world=2)


def in_backward():
    _train(twins(), sums=False)


def test_the_default_mode_has_none(pool):
    pool.run(in_backward, world=2)
