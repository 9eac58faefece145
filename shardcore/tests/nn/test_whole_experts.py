"""Whole experts on the ranks of ``ep``: values, gradients, routing, collectives, and trainings that go on elsewhere."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from experts_net import EXPERTS, MixturePolicy, balance, batch, build, captured, routed, trains
from needs import FUSED
from tiny import Config, TinyLM, TinyPolicy
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import shardcore
from shardcore import ConfigError, ModelSharder, PlanError, ShardConfig
from shardcore.fsdp.phase import apply_data_parallel
from shardcore.mesh.context import context_of
from shardcore.styles import experts
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_gradients_own_storage, assert_same_gradients, whole

pytestmark = FUSED

SHARED = ("shared_expert.w1", "shared_expert.w3")
STACKED = ("stacked", "transposed")
MESHES = {
    "ep2": (2, {"dp": 2, "ep": 2}),
    "tp2 ep2": (4, {"tp": 2, "dp": 2, "ep": 2}),
    "tp2 ep2 sequence": (4, {"tp": 2, "ep": 2, "enable_sequence_parallelism": True}),
    "shard2 ep2": (4, {"tp": 1, "dp": 4, "ep": 2}),
    "replicate2 ep2": (4, {"dp_replicate_size": 2, "dp_shard_size": 2, "ep": 2}),
    "deferred": (4, {"tp": 2, "ep": 2, "partial_gradients": "deferred"}),
}


def pair(kind, **fields):
    reference = build(kind)
    return reference, shardcore.shard(copy.deepcopy(reference), policy=MixturePolicy, **fields)


def compares(kind, fields):
    reference, model = pair(kind, **fields)
    of_reference, of_model = captured(reference), captured(model)
    context = context_of(model)
    replicas = context.sizes.replicas
    for step in range(2):  # gradients accumulate
        for replica in range(replicas):  # with other numbers of tokens
            x = batch(step * replicas + replica, rows=1 + replica, length=3 + replica)
            wanted = reference(x)
            ((wanted.pow(3).sum() + balance(of_reference)) / replicas).backward()
            if replica == context.replica:
                got = model(x)
                assert_close(wanted, got, "output")
                for theirs, ours in zip(of_reference, of_model, strict=True):
                    assert_close(theirs, ours, "logits")
                (got.pow(3).sum() + balance(of_model)).backward()
            of_reference.clear(), of_model.clear()
    shardcore.reduce_partial_gradients(model)
    assert_same_gradients(reference, model)
    assert_gradients_own_storage(model)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().size(0) <= -(-EXPERTS // 2), name
    theirs, ours = (torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05) for net in (reference, model))
    assert_close(theirs, whole(ours), "norm of all gradients")
    assert_same_gradients(reference, model)
    with torch.no_grad():
        assert_close(reference(batch(2)), model.eval()(batch(2)), "a forward without gradients")


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", STACKED)
def test_whole_experts_compute_what_experts_do(pool, kind, mesh):
    world, fields = MESHES[mesh]
    pool.run(compares, kind, fields, world=world)


def routed_to(expert, net):
    """Let every token of a net choose one expert and its neighbour."""
    for block in net.blocks:
        with torch.no_grad():
            weight = block.mixture.gate.weight
            chosen = torch.zeros(EXPERTS, dtype=torch.float64)
            chosen[expert], chosen[expert + 1] = 9.0, 8.0
            weight.copy_(weight * 0.01)
        block.norm.bias.requires_grad_(False)
        block.mixture.gate.register_forward_hook(functools.partial(_biased, chosen=chosen))


def _biased(module, args, out, chosen):
    logits = out[0] + chosen
    top, places = logits.softmax(-1).topk(2, -1)
    return logits, top / top.sum(-1, keepdim=True), places


def leaves_ranks_out(expert, trained):
    reference = build("stacked")
    routed_to(expert, reference)
    for name, parameter in reference.named_parameters():
        parameter.requires_grad_(trained in name)
    model = shardcore.shard(copy.deepcopy(reference), policy=MixturePolicy, dp=2, ep=2)
    replica = context_of(model).replica
    for index in range(2):
        x = batch(index, rows=1 + index)
        wanted = reference(x).pow(3).sum()
        (wanted / 2).backward()
        if index == replica:
            model(x).pow(3).sum().backward()
    for parameter in reference.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    assert_same_gradients(reference, model)


@pytest.mark.parametrize("trained", ["", "experts", "gate", "first"])
@pytest.mark.parametrize("expert", [0, 3])
def test_a_rank_without_tokens(pool, expert, trained):
    """Experts 0 to 2 are on the first rank, 3 and 4 on the second: nobody waits for the one that gets nothing."""
    pool.run(leaves_ranks_out, expert, trained)


def recomputes(fields):
    reference, model = pair("stacked", dp=2, ep=2, **fields)
    model.recomputed = False
    replica = context_of(model).replica
    for index in range(2):
        x = batch(index)
        (reference(x).pow(3).sum() / 2).backward()
        if index == replica:
            model(x).pow(3).sum().backward()
    assert_same_gradients(reference, model)


@pytest.mark.parametrize("fields", [{}, {"tp": 2}, {"tp": 2, "enable_sequence_parallelism": True}])
def test_blocks_are_recomputed(pool, fields):
    pool.run(recomputes, fields, world=2 * fields.get("tp", 1))


TRAINED = {
    "ep2": (2, {"dp": 2, "ep": 2}),
    "tp2 ep2": (4, {"tp": 2, "ep": 2}),
    "shard2 ep2": (4, {"dp": 4, "ep": 2}),
    "tp2": (2, {"tp": 2}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", STACKED)
def test_trainings_go_on_on_other_meshes(pool, kind, tmp_path):
    names = list(TRAINED)
    for name in names:
        world, fields = TRAINED[name]
        pool.run(trains, kind, str(tmp_path / name), fields, None, world=world)
    for at, name in enumerate(names):
        world, fields = TRAINED[names[at - 1]]
        pool.run(trains, kind, "", fields, str(tmp_path / name), world=world)


def counts():
    _, model = pair("stacked", dp=2, ep=2)
    loss = None
    with Collectives() as forward:
        loss = model(batch()).sum()
    with Collectives() as backward:
        loss.backward()
    return forward.counts, backward.counts


def test_what_is_sent(pool):
    (forward, backward), _ = pool.run(counts)
    assert forward["alltoall_base"] == 2 * 3
    assert backward["alltoall_base"] == 2 * 2


def loads_whole_tensors():
    _, model = pair("stacked", tp=2, ep=2)
    other = build("stacked", seed=4)
    model.load_state_dict(other.state_dict())
    for name, tensor in other.state_dict().items():
        assert torch.equal(whole(model.state_dict()[name]), tensor), name
    return repr(model.blocks[0].mixture.experts)


def test_whole_tensors_are_split(pool):
    found = pool.run(loads_whole_tensors, world=4)[0]
    assert "tp=2, ep=2" in found


class ExactRouter(nn.Module):
    """Scores tokens in double precision, whatever its weight is of."""

    def __init__(self, router):
        super().__init__()
        self.weight = router.weight

    def forward(self, x):
        logits = nn.functional.linear(x.double(), self.weight.double())
        return logits, *routed(logits)


def mixes_precision():
    """In half precision, too, what the router makes in full precision arrives at the experts so."""
    outputs = []
    for ep in (1, 2):
        model = build("stacked")
        for block in model.blocks:
            block.mixture.gate = ExactRouter(block.mixture.gate)
        sharder = ModelSharder(model, ExactPolicy(), ShardConfig.of(tp=1, dp=2, ep=ep))
        sharder.shard()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float64)
        apply_data_parallel(model, sharder.context, MixturePolicy.stages, mp_policy=policy)
        out = model(batch(sharder.context.replica))
        out.pow(3).sum().backward()
        assert {block.mixture.experts.dtypes for block in model.blocks} == {(torch.bfloat16, torch.float64)}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        outputs.append((out.detach(), whole(norm)))
    (wanted, theirs), (got, ours) = outputs
    assert wanted.dtype is got.dtype is torch.bfloat16
    # What two experts make of a token is added up in another order.
    assert (wanted - got).abs().max() <= 0.01 * wanted.abs().max()
    assert abs(theirs - ours) <= 0.02 * theirs


class ExactPolicy(MixturePolicy):
    rule = experts("mixture", captured=0, shared_col=SHARED, shared_row="shared_expert.w2")


def test_mixed_precision(pool):
    pool.run(mixes_precision)


REFUSED = {
    "a list": ("list", {"dp": 2, "ep": 2}, PlanError, "a list of 5 modules"),
    "too many": ("stacked", {"dp": 4, "ep": 4}, PlanError, "leave the last of 4 ranks of the axis ep without one"),
    "sizes": ("stacked", {"tp": 2, "dp": 1, "ep": 2}, ConfigError, "expert_parallel_size 2 does not divide"),
    "no experts": ("none", {"dp": 2, "ep": 2}, PlanError, "no experts that the policy shares among replicas"),
    "a group": (
        "stacked",
        {"dp": 2, "ep": 2, "group": True},
        ConfigError,
        "tensor_parallel_process_group says nothing",
    ),
    "unwrapped": ("stacked", {"dp": 2, "ep": 2, "wrap": False}, ConfigError, "wrap=False with expert_parallel_size 2"),
}


def refuses(name):
    kind, fields, error, words = REFUSED[name]
    fields = dict(fields)
    policy = TinyPolicy if kind == "none" else MixturePolicy
    model = TinyLM(Config()) if kind == "none" else build(kind)
    if fields.pop("group", False):
        fields = {"ep": 2, "tensor_parallel_process_group": dist.group.WORLD}
    with pytest.raises(error, match=words):
        shardcore.shard(model, policy=policy, **fields)
    assert not any(isinstance(p, DTensor) for p in model.parameters())


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(pool, name):
    fields = REFUSED[name][1]
    pool.run(refuses, name, world=fields.get("tp", 1) * fields["dp"])
