"""`shardcore.grad_norm` is the norm of the unsharded model's gradients, whatever the mesh; pipelines: test_booster."""

from __future__ import annotations

import pytest
import torch
from needs import PIPELINES
from tiny import TinyPolicy, batch, build, twins

import shardcore
from shardcore import ConfigError
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_close, whole

pytestmark = PIPELINES

MESHES = {
    "tp2": (2, {"tp": 2}),
    "dp2": (2, {"dp": 2}),
    "replicate2": (2, {"dp_replicate_size": 2}),
    "tp4": (4, {"tp": 4}),
    "tp2 dp2": (4, {"tp": 2, "dp": 2}),
}


def norms(fields):
    reference, model = build(), shardcore.shard(build(), policy=TinyPolicy, **fields)
    context = context_of(model)
    ids = batch(rows=4)
    reference(ids).pow(2).mean().backward()
    model(ids.chunk(context.sizes.replicas)[context.replica]).pow(2).mean().backward()
    before = {name: whole(p.grad) for name, p in model.named_parameters()}
    norm = shardcore.grad_norm(model)
    assert type(norm) is torch.Tensor
    assert_close(torch.nn.utils.get_total_norm([p.grad for p in reference.parameters()]), norm, "norm")
    assert_close(shardcore.grad_norm(reference), norm, "the unsharded model's")
    for name, parameter in model.named_parameters():
        assert torch.equal(before[name], whole(parameter.grad)), name
    return norm.item()


@pytest.mark.parametrize("mesh", MESHES)
def test_the_norm_is_that_of_the_whole_model(pool, mesh):
    world, fields = MESHES[mesh]
    assert len(set(pool.run(norms, fields, world=world))) == 1


def elsewhere(fields):
    """Of what holds sharded models, beside plain parameters, and of a part of one."""
    context = context_of(model := shardcore.shard(build(), policy=TinyPolicy, **fields))
    other, plain = shardcore.shard(build(1), policy=TinyPolicy, **fields), torch.nn.Linear(97, 1).double()
    ids = batch(rows=4).chunk(context.sizes.replicas)[context.replica]
    for p in plain.parameters():
        torch.nn.init.constant_(p, 0.5)
    (model(ids).pow(2).mean() + plain(other(ids)).pow(2).mean()).backward()
    for p in plain.parameters():
        torch.distributed.all_reduce(p.grad)
        p.grad /= torch.distributed.get_world_size()
    outer = torch.nn.ModuleList([model, torch.nn.Sequential(other), plain])
    for module in (outer, torch.nn.Sequential(model), model.model, model.model.layers[0], torch.nn.Sequential(plain)):
        grads = [whole(p.grad).double() for p in module.parameters() if p.grad is not None]
        wanted = torch.stack([grad.pow(2).sum() for grad in grads]).sum().sqrt()
        assert_close(wanted, shardcore.grad_norm(module), type(module).__name__)


@pytest.mark.parametrize("mesh", ["tp2", "dp2", "tp2 dp2"])
def test_the_norm_of_what_holds_sharded_models_and_of_a_part(pool, mesh):
    world, fields = MESHES[mesh]
    pool.run(elsewhere, fields, world=world)


def partial():
    model = twins(fields={"tp": 2, "partial_gradients": "deferred"})[1]
    model(batch()).pow(2).mean().backward()
    with pytest.raises(ConfigError, match=r"is this rank's summand; call shardcore.reduce_partial_gradients\(model\)"):
        shardcore.grad_norm(model)
    shardcore.reduce_partial_gradients(torch.nn.Sequential(model))  # or what holds it, as the norm is asked of
    return shardcore.grad_norm(model).item()


def test_partial_gradients_have_no_norm_yet(pool):
    first, second = pool.run(partial)
    assert first == second > 0


def test_a_model_without_gradients():
    assert shardcore.grad_norm(build()).item() == 0
