"""Sharded Llama in lower precisions: as near to the unsharded model as that model's own rounding is to exact numbers.

The bound: a gradient may differ from the unsharded model's, under the same setting, by LIMIT of the largest gradient.
In bfloat16 rounding alone moves them by about 1 %; a bias that is counted twice moves the logits by more than 10 %.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from llama_cases import batch, build, compare_forward, pair, shard, train_beside
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import shardcore
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_close, assert_same_gradients, gradient_errors

pytestmark = pytest.mark.newest

LIMIT = 0.03


def test_float32(pool):
    pool.run(_float32, world=4)


def _float32() -> None:
    reference, model = pair(dtype=torch.float32, num_key_value_heads=2)
    # Not Adam, whose steps depend on the sign of gradients however small they are.
    train_beside(reference, model, steps=2, tolerance=1e-5, optimizer=_sgd)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1.0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_bfloat16(pool, when):
    pool.run(_bfloat16, when, world=2)


def _bfloat16(when: str) -> None:
    reference = build(num_key_value_heads=2, dtype=torch.float32)
    model = copy.deepcopy(reference)
    reference.to(torch.bfloat16)
    if when == "before":
        model.to(torch.bfloat16)
    shard(model)
    if when == "after":
        assert model.to(torch.bfloat16) is model
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for seed in (0, 1):
        compare_forward(reference, model, batch(reference, seed), LIMIT)
    assert {p.grad.dtype for p in model.parameters()} == {torch.bfloat16}
    assert_same_gradients(reference, model, LIMIT)


def test_autocast(pool):
    pool.run(_autocast, world=2)


def _autocast() -> None:
    reference = build(num_key_value_heads=1, dtype=torch.float32)
    model = shard(copy.deepcopy(reference))
    for seed in (0, 1):
        inputs = batch(reference, seed)
        with torch.autocast("cpu", torch.bfloat16):
            wanted, got = reference(**inputs), model(**inputs)
        assert wanted.logits.dtype == got.logits.dtype == torch.bfloat16
        assert_close(wanted.logits, got.logits, "logits", LIMIT)
        wanted.loss.backward()
        got.loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_same_gradients(reference, model, LIMIT)


def test_mixed_precision_of_fsdp(pool):
    pool.run(_mixed, world=4)


def _mixed() -> None:
    reference = build(dtype=torch.float32)
    model = shard(copy.deepcopy(reference), tp=2, dp=2, wrap=False)
    mesh = context_of(model).mesh["dp_shard"]
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=mixed)
    fully_shard(model, mesh=mesh, mp_policy=mixed)
    # The same by hand: a bfloat16 copy computes, float32 gradients are averaged over the two halves of the data.
    for half in (0, 1):
        twin = copy.deepcopy(reference).to(torch.bfloat16)
        out = twin(**batch(twin, half))
        out.loss.backward()
        for parameter, low in zip(reference.parameters(), twin.parameters(), strict=True):
            share = low.grad.float() / 2
            parameter.grad = share if parameter.grad is None else parameter.grad + share
        if half == mesh.get_local_rank():
            mine = model(**batch(twin, half))
            assert mine.logits.dtype == torch.bfloat16
            assert_close(out.logits, mine.logits, "logits", LIMIT)
    mine.loss.backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_same_gradients(reference, model, LIMIT)


def test_the_limit_would_notice_a_bias_counted_twice(pool):
    pool.run(_noticed, world=2)


def _noticed() -> None:
    reference = build(dtype=torch.bfloat16)
    model = copy.deepcopy(reference)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.down_proj.bias.mul_(dist.get_world_size())  # H4, without breaking the code
    shard(model)
    inputs = batch(reference)
    for m in (reference, model):
        m(**inputs).loss.backward()
    with pytest.raises(AssertionError):
        assert_close(reference(**inputs).logits, model(**inputs).logits, "logits", LIMIT)
    assert max(gradient_errors(reference, model).values()) > LIMIT


def test_second_derivatives_are_refused(pool):
    pool.run(_second, world=2)


def _second() -> None:
    model = shard(build())
    loss = model(**batch(model)).loss
    with pytest.raises(shardcore.NotSupportedError, match="create_graph=True"):
        loss.backward(create_graph=True)
    assert isinstance(model, nn.Module)
