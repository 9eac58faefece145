"""Options of FSDP2 that `shardcore.shard` is given: on every mesh, and only where they say something."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from experts_net import MixturePolicy
from experts_net import batch as experts_batch
from experts_net import build as experts_build
from needs import FUSED
from tiny import TinyPolicy, batch, build
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, init_device_mesh

import shardcore
from shardcore import AgreementError, ConfigError
from shardcore.mesh.context import context_of
from shardcore_testing.parity import whole

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def in_half_precision(fields):
    reference = build()
    seen = []
    model = shardcore.shard(copy.deepcopy(reference), policy=TinyPolicy, wrap={"mp_policy": HALF}, **fields)
    assert isinstance(model, FSDPModule)
    for block in model.model.layers:
        assert isinstance(block, FSDPModule)
        block.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    context = context_of(model)
    losses = []
    for replica in range(context.sizes.replicas):
        ids = batch(replica, rows=2)
        wanted = reference(ids, labels=ids.roll(1, 1))
        (wanted / context.sizes.replicas).backward()
        if replica == context.replica:
            got = model(ids, labels=ids.roll(1, 1))
            got.backward()
            losses = [float(wanted.detach()), float(got.detach())]
    assert set(seen) == {torch.bfloat16}
    assert abs(losses[0] - losses[1]) <= 0.03 * abs(losses[0])
    wanted = dict(reference.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in wanted.values())
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float64
        assert float((whole(parameter.grad) - wanted[name].grad).abs().max()) <= 0.1 * largest, name
    norms = [nn.utils.clip_grad_norm_(net.parameters(), 1.0) for net in (reference, model)]
    assert abs(float(norms[0]) - float(whole(norms[1]))) <= 0.05 * float(norms[0])


MESHES = [
    (2, {"tp": 2}),
    (2, {"tp": 1, "dp": 2}),
    (2, {"tp": 1, "dp_replicate_size": 2}),
    (4, {"tp": 2, "dp": 2}),
]


@pytest.mark.parametrize(("world", "fields"), MESHES)
def test_half_precision(pool, world, fields):
    pool.run(in_half_precision, fields, world=world)


def with_experts():
    model = shardcore.shard(experts_build("stacked"), policy=MixturePolicy, dp=2, ep=2, wrap={"mp_policy": HALF})
    out = model(experts_batch())
    assert out.dtype is torch.bfloat16
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@FUSED
def test_experts_too(pool):
    pool.run(with_experts)


def kept():
    """What is not let go after the forward is there in the backward."""
    for reshards in (True, False):
        model = shardcore.shard(build(), policy=TinyPolicy, tp=1, dp=2, wrap={"reshard_after_forward": reshards})
        ids = batch(rows=1)
        model(ids, labels=ids)
        parts = [p.to_local() if isinstance(p, DTensor) else p for p in model.model.layers[0].parameters()]
        gathered = [part.shape == p.shape for part, p in zip(parts, model.model.layers[0].parameters(), strict=True)]
        assert all(gathered) is not reshards


def test_resharding(pool):
    pool.run(kept)


def refuses():
    for given, words in (
        ("yes", "wrap= must be True, False or a mapping of options of FSDP2, got 'yes'"),
        ({"mesh": 1}, "wrap= has no option 'mesh'; the options of FSDP2 are mp_policy, offload_policy"),
        ({"mp_policy": torch.bfloat16}, "'mp_policy': ...} must be a MixedPrecisionPolicy, got torch.bfloat16"),
    ):
        with pytest.raises(ConfigError, match=words):
            shardcore.shard(build(), policy=TinyPolicy, tp=2, wrap=given)
    with pytest.raises(ConfigError, match="dp_shard_size is 1: nothing is divided"):
        shardcore.shard(build(), policy=TinyPolicy, tp=2, wrap={"reshard_after_forward": True})
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ConfigError, match="nothing says over which ranks it is applied"):
        shardcore.shard(build(), policy=TinyPolicy, device_mesh=mesh, wrap={"mp_policy": HALF})
    own = {"mp_policy": HALF} if dist.get_rank() else True
    with pytest.raises(AgreementError, match="the argument wrap"):
        shardcore.shard(build(), policy=TinyPolicy, tp=2, wrap=own)


def test_refusals(pool):
    pool.run(refuses)


def test_one_rank_alone_has_nothing_to_apply_them_to():
    with pytest.raises(ConfigError, match="needs a process group of two ranks"):
        shardcore.shard(build(), policy=TinyPolicy, tp=1, wrap={"mp_policy": HALF})
