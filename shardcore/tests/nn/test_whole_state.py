"""State of an unsharded optimizer, loaded by its own `load_state_dict`, is split before the next step."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny import TinyPolicy, batch, build
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore_testing.parity import assert_same_parameters

KINDS = {
    "AdamW": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1}),
    "AdamW, foreach": (torch.optim.AdamW, {"lr": 1e-2, "eps": 1e-3, "foreach": True}),
    "SGD": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "SGD, no state": (torch.optim.SGD, {"lr": 1e-2}),
}
MESHES = {
    "tp2": (2, {"tp": 2}),
    "dp2": (2, {"dp": 2}),
    "replicate2": (2, {"dp": 2, "dp_replicate_size": 2}),
    "tp2 dp2": (4, {"tp": 2, "dp": 2}),
}


def frozen(model):
    """The bias of a key's norm has no true gradient, which AdamW would make a step of."""
    for name, p in model.named_parameters():
        p.requires_grad_("k_norm.bias" not in name)
    return model


def step(model, optimizer, number):
    optimizer.zero_grad()
    ids = batch(number, rows=4)
    model(ids).square().mean().backward()
    optimizer.step()


def goes_on(fields, name):
    kind, settings = KINDS[name]
    reference = frozen(build())
    theirs = kind(reference.parameters(), **settings)
    for number in range(2):
        step(reference, theirs, number)
    model = shardcore.shard(frozen(build()), policy=TinyPolicy(), **fields)
    ours = kind(model.parameters(), **settings)
    model.load_state_dict(reference.state_dict())
    saved = copy.deepcopy(theirs.state_dict())
    ours.load_state_dict(saved)
    for number in range(2, 4):
        step(reference, theirs, number)
        step(model, ours, number)
    assert_same_parameters(reference, model)
    for p, state in ours.state.items():
        for value in state.values():
            if isinstance(value, DTensor) and value.ndim:
                assert local_tensor(value).shape == local_tensor(p).shape
                # Nothing holds the whole tensors that were loaded.
                assert local_tensor(value).untyped_storage().nbytes() == local_tensor(value).nbytes
    # What was given is as it was.
    assert not any(isinstance(v, DTensor) for state in saved["state"].values() for v in state.values())


def all_kinds(fields):
    for name in KINDS:
        goes_on(fields, name)


@pytest.mark.nightly
@pytest.mark.parametrize("mesh", MESHES)
def test_an_unsharded_training_goes_on(pool, mesh):
    world, fields = MESHES[mesh]
    pool.run(all_kinds, fields, world=world, timeout=120)


class LooksAtParts(torch.optim.Optimizer):
    """Keeps plain state of the shape of each part, as optimizers do that work on `to_local()`."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                part, grad = local_tensor(p), local_tensor(p.grad)
                mean = self.state[p].setdefault("mean", torch.zeros_like(part))
                assert not isinstance(mean, DTensor)
                part.sub_(mean.lerp_(grad, 0.5), alpha=group["lr"])


def looks_at_parts():
    """On one mesh where the first parameters are split, and on one where the part of each is a whole."""
    for fields in ({"tp": 2}, {"dp": 2, "dp_replicate_size": 2}):
        model = shardcore.shard(build(), policy=TinyPolicy(), **fields)
        optimizer = LooksAtParts(model.parameters())
        for number in range(2):
            step(model, optimizer, number)
        optimizer.load_state_dict(optimizer.state_dict())
        step(model, optimizer, 2)


def test_plain_state_of_parts_stays_plain(pool):
    pool.run(looks_at_parts, world=2)


def saves(folder):
    """Before any step: what was loaded is in the checkpoint."""
    reference = frozen(build())
    theirs = torch.optim.AdamW(reference.parameters(), lr=1e-2, eps=1e-3)
    step(reference, theirs, 0)
    models = [shardcore.shard(frozen(build()), policy=TinyPolicy(), tp=2) for _ in range(2)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3) for model in models]
    models[0].load_state_dict(reference.state_dict())
    optimizers[0].load_state_dict(theirs.state_dict())
    shardcore.save_checkpoint(folder, models[0], optimizers[0], step=1)
    shardcore.load_checkpoint(folder, models[1], optimizers[1])
    step(reference, theirs, 1)
    step(models[1], optimizers[1], 1)
    assert_same_parameters(reference, models[1])


def test_it_is_saved_before_any_step_too(pool, tmp_path):
    pool.run(saves, str(tmp_path), world=2)
