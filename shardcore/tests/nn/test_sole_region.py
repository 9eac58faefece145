"""Regions of one column linear, entered at the linear itself: one node, the same numbers."""

from __future__ import annotations

import copy

import pytest
import torch
from blocks import Mlp
from tiny import randomize, shard

from shardcore.errors import NotSupportedError
from shardcore.nn.region.inner import SoleRegion
from shardcore.policy import Policy
from shardcore.styles import region
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients


class MlpPolicy(Policy):
    def module_policy(self):
        return {"Mlp": [region(col="up", row="down")]}


def _pair(**options):
    reference = Mlp(6, 10, **options).double()
    randomize(reference)
    sharded = shard(copy.deepcopy(reference), MlpPolicy, tp=torch.distributed.get_world_size())
    assert isinstance(sharded.up.sole_region, SoleRegion)
    assert sharded.down.region is sharded.up.sole_region
    assert not sharded.up._forward_pre_hooks
    return reference, sharded


def _x(seed=0):
    return torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("frozen", [(), ("up.weight",), ("up.weight", "up.bias"), ("up.bias",)])
def test_gradients(pool, world, bias, frozen):
    pool.run(_gradients, bias, frozen, world=world)


def _gradients(bias, frozen):
    reference, sharded = _pair(bias=bias)
    for model in (reference, sharded):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
    inputs = [_x().requires_grad_() for _ in range(2)]
    for model, x in zip((reference, sharded), inputs, strict=True):
        for _ in range(2):  # gradients add up, and the output is used twice
            out = model(x)
            (out * _x(1) + out.square()).sum().backward()
    assert_close(inputs[0].grad, inputs[1].grad, "input gradient", 1e-12)
    assert_same_gradients(reference, sharded)
    for name in frozen:
        assert sharded.get_parameter(name).grad is None if bias or "bias" not in name else True


def test_number_of_collectives(pool):
    pool.run(_collectives, world=2)


def _collectives():
    _, sharded = _pair()
    for needs, backward in ((True, 1), (False, 0)):
        with Collectives() as counted:
            out = sharded(_x().requires_grad_(needs))
            forward = counted.count
            out.sum().backward()
        assert (forward, counted.count - forward) == (1, backward)


def test_low_precision(pool):
    pool.run(_autocast, world=2)


def _autocast():
    reference, sharded = _pair()
    inputs = [_x().float().requires_grad_() for _ in range(2)]
    for model, x in zip((reference.float(), sharded.float()), inputs, strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            assert model.up(x).dtype == torch.bfloat16
            out = model(x)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    assert inputs[1].grad.dtype == torch.float32
    assert_close(inputs[0].grad, inputs[1].grad, "input gradient", 0.02)
    assert_same_gradients(reference, sharded, 0.02)


def test_a_second_backward_is_refused(pool):
    pool.run(_second, world=2)


def _second():
    _, sharded = _pair()
    x = _x().requires_grad_()
    with pytest.raises(NotSupportedError, match="create_graph"):
        torch.autograd.grad(sharded(x).sum(), x, create_graph=True)
