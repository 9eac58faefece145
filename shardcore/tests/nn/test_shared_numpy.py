"""Methods that draw from numpy's global generator: the same numbers on all ranks, from the model's own stream."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tiny import shard
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardcore
from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import NotSupportedError, PlanError
from shardcore.policy import Policy
from shardcore.styles import region, shared_numpy


class Masking(nn.Module):
    """A model that masks some of its inputs in training, as SpecAugment does."""

    def __init__(self, share=0.5):
        super().__init__()
        self.share = share
        self.up, self.down = nn.Linear(32, 16), nn.Linear(16, 32)

    def mask(self, x):
        if self.training and self.share:
            x = x * torch.from_numpy(np.random.rand(*x.shape) > self.share)
        return x

    def forward(self, x):
        self.seen = self.mask(x)
        return self.down(self.up(self.seen))


class MaskingPolicy(Policy):
    method = "mask"

    def module_policy(self):
        return {"Masking": [region(col="up", row="down"), shared_numpy(self.method)]}


class MisnamedPolicy(MaskingPolicy):
    method = "masks"


def _model(**options):
    torch.manual_seed(0)
    model = shard(Masking(**options).to(torch.float64), MaskingPolicy)
    torch.manual_seed(dist.get_rank())
    np.random.seed(dist.get_rank())
    return model


_X = torch.ones(4, 32, dtype=torch.float64)


def _gathered(tensor):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return parts


def alike():
    model = _model()
    users = np.random.get_state()[1].copy(), torch.get_rng_state()
    seen = []
    for _ in range(3):
        model(_X).sum().backward()
        first, *others = _gathered(model.seen)
        assert all(torch.equal(first, other) for other in others)
        assert 0 < first.sum() < first.numel()
        seen.append(first)
    model.mask(_X)  # outside of a forward too
    assert not torch.equal(seen[0], seen[1])
    assert np.array_equal(np.random.get_state()[1], users[0])
    assert torch.equal(torch.get_rng_state(), users[1])


def from_the_stream():
    model = _model()
    shardcore.manual_seed(model, 5)
    model(_X)
    first, state = model.seen, shardcore.get_rng_state(model)
    model(_X)
    second = model.seen
    shardcore.manual_seed(model, 5)
    model(_X)
    assert torch.equal(model.seen, first)
    shardcore.set_rng_state(model, state)
    model(_X)
    assert torch.equal(model.seen, second)


def unused():
    for model in (_model(share=0.0), _model().eval()):
        state = shardcore.get_rng_state(model)["cpu"]
        model(_X)
        assert torch.equal(shardcore.get_rng_state(model)["cpu"], state)


def recomputed():
    model = _model()
    loss = checkpoint(model, _X.clone().requires_grad_(), use_reentrant=False).sum()
    with pytest.raises(NotSupportedError, match=r"a checkpoint around the whole Masking .* than mask drew before"):
        loss.backward()
    quiet = _model(share=0.0)
    checkpoint(quiet, _X.clone().requires_grad_(), use_reentrant=False).sum().backward()
    assert quiet.up.weight.grad is not None


def compiled():
    model = _model().eval()
    wanted = model(_X)
    torch._dynamo.reset()
    assert torch.allclose(torch.compile(model, backend="eager")(_X), wanted)
    model.train()
    torch.compile(model, backend="eager")(_X)
    first, *others = _gathered(model.seen)
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("what", [alike, from_the_stream, unused, recomputed], ids=lambda f: f.__name__)
def test_numpys_numbers(pool, what):
    pool.run(what, world=2)


# Dynamo makes an internal error of a warning that is an error, and torch warns of its own doings while it traces.
@pytest.mark.nightly
@pytest.mark.filterwarnings("default")
def test_compiled(pool):
    pool.run(compiled, world=2)


def test_one_rank_draws_as_it_did():
    model = shardcore.shard(Masking().to(torch.float64), policy=MaskingPolicy(), tp=1)
    np.random.seed(3)
    wanted = np.random.rand(4, 32) > 0.5
    np.random.seed(3)
    model(_X)
    assert np.array_equal(model.seen.bool().numpy(), wanted)


def test_a_method_that_is_not_there():
    with pytest.raises(PlanError, match="Masking has no method masks"):
        compile_plan(MisnamedPolicy, Masking(), ShardConfig(tensor_parallel_size=2))
