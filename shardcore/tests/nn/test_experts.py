"""Slices of every expert on each rank: values, gradients, routing, collectives, and trainings that go on elsewhere."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from experts_net import FORMS, KINDS, balance, batch, build, captured, trains, twins
from needs import FUSED
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.mesh.context import context_of
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import (
    assert_close,
    assert_gradients_own_storage,
    assert_same_gradients,
    assert_same_parameters,
    whole,
)

pytestmark = FUSED

SEQUENCE = {"enable_sequence_parallelism": True}
FIELDS = {
    "plain": {},
    "sequence": SEQUENCE,
    "gathered again": {**SEQUENCE, "sequence_keep_gathered": False},
    "deferred": {"partial_gradients": "deferred"},
}


def compares(kind, fields):
    reference, model = twins(kind, **fields)
    ranks = dist.get_world_size()
    of_reference, of_model = captured(reference), captured(model)
    for step in range(2):  # gradients accumulate
        wanted, got = reference(batch(step)), model(batch(step))
        assert_close(wanted, got, "output")
        for theirs, ours in zip(of_reference, of_model, strict=True):
            assert_close(theirs, ours, "logits")
        (wanted.pow(3).sum() + balance(of_reference)).backward()
        (got.pow(3).sum() + balance(of_model)).backward()
        of_reference.clear(), of_model.clear()
    shardcore.reduce_partial_gradients(model)
    assert_same_gradients(reference, model)
    assert_gradients_own_storage(model)
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().numel() <= -(-parameter.numel() * 3 // (2 * ranks)), name
    assert_close(reference(batch(2)), model.eval()(batch(2)).detach(), "another forward")


@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_compute_what_experts_do(pool, kind, fields):
    for world in (2, 4):
        pool.run(compares, kind, fields, world=world)


@pytest.mark.parametrize("kind", FORMS)
def test_experts_with_biases_and_without_gates(pool, kind):
    pool.run(compares, kind, {}, world=2)


def recomputes(kind):
    for fields in ({}, SEQUENCE):
        for reentrant in (False, True):
            if fields and reentrant:
                continue  # refused: see test_token_net
            reference, model = twins(kind, **fields)
            model.recomputed = reentrant
            for net in (reference, model):
                x = batch().requires_grad_()
                net(x).pow(3).sum().backward()
            assert_same_gradients(reference, model)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_recomputed(pool, kind):
    pool.run(recomputes, kind)


def sends(kind, fields):
    _, model = twins(kind, **fields)
    loss = None
    with Collectives() as forward:
        loss = model(batch()).sum()
    with Collectives() as backward:
        loss.backward()
    return forward.counts, backward.counts


def test_each_mixture_sums_once_each_way(pool):
    counts = {kind: pool.run(sends, kind, {})[0] for kind in KINDS}
    # Backward: the input's gradient, and those of the router and of the shared expert's gate.
    for forward, backward in counts.values():
        assert sum(forward.values()) == 2
        assert sum(backward.values()) == 2 * 3


MESHES = {"tp2": (2, {"tp": 2}), "tp4": (4, {"tp": 4}), "tp2 dp2": (4, {"tp": 2, "dp": 2})}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_trainings_go_on_on_other_meshes(pool, kind, tmp_path):
    names = list(MESHES)
    for name in names:
        world, fields = MESHES[name]
        pool.run(trains, kind, str(tmp_path / name), fields, None, world=world)
    for at, name in enumerate(names):
        world, fields = MESHES[names[at - 1]]
        pool.run(trains, kind, "", fields, str(tmp_path / name), world=world)


def visits_few(kind, recomputed, fields):
    reference, model = twins(kind, **fields)
    context = context_of(model)
    parts, part = context.sizes.replicas, context.replica
    both = reference, model
    optimizers = [torch.optim.SGD(net.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1) for net in both]
    missed = 0
    for step in range(3):
        for micro in range(2):
            x = batch(
                2 * step + micro, rows=parts, length=1
            )  # each replica has one token, which two of five experts see
            for net in both:
                net.recomputed = recomputed
                own = (x if net is reference else x.chunk(parts)[part]).requires_grad_()
                net(own).pow(3).mean().backward()
        given = [sorted(name for name, p in net.named_parameters() if p.grad is None) for net in both]
        assert given[0] == given[1]
        missed += len(given[0])
        assert_same_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(reference, model)
    return missed


FEW = {
    "dp2": (2, {"dp": 2}),
    "dp4": (4, {"dp": 4}),
    "replicate2 shard2": (4, {"dp_replicate_size": 2, "dp_shard_size": 2}),
    "tp2 dp2": (4, {"tp": 2, "dp": 2}),
}


@pytest.mark.parametrize(
    "recomputed", [None, *(pytest.param(value, marks=pytest.mark.nightly) for value in (False, True))]
)
@pytest.mark.parametrize("mesh", FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_that_visit_other_experts(pool, kind, mesh, recomputed):
    world, fields = FEW[mesh]
    missed = pool.run(visits_few, kind, recomputed, fields, world=world)
    # Parameters that nobody has visited have no gradient, and the optimizer leaves them alone, as unsharded.
    assert (min(missed) > 0) == (kind == "list")


def loads_whole_tensors(kind):
    _, model = twins(kind, tp=2)
    other = build(kind, seed=4)
    model.load_state_dict(other.state_dict())
    for name, tensor in other.state_dict().items():
        assert torch.equal(whole(model.state_dict()[name]), tensor), name
    return repr(model.blocks[0].mixture.experts)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_tensors_are_split(pool, kind):
    assert "tp=2" in pool.run(loads_whole_tensors, kind)[0]
