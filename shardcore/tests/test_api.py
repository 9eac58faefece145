"""`shardcore.shard`: what users call, with data parallelism and optimizers."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from tiny import TinyPolicy, batch, build, shard
from torch import nn
from torch.distributed.tensor import DTensor

import shardcore
from shardcore.config import ShardConfig
from shardcore.errors import AgreementError, ConfigError, NotSupportedError, StaleOptimizerWarning
from shardcore.fsdp.optimizers import held_elsewhere
from shardcore.mesh.context import context_of
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters

CLIP = 1e-2


def _step(model, ids, optimizer=None):
    model(ids, labels=ids.roll(1, 1)).backward()
    if optimizer is None:
        return None
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    optimizer.step()
    optimizer.zero_grad()
    return norm


def optimizers():
    """H8: clipping counts every parameter once, over several steps of every implementation of AdamW."""
    for options in ({}, {"foreach": True}, {"fused": True}):
        for kv_heads in (2, 8):
            reference = build(kv_heads=kv_heads)
            sharded = shard(copy.deepcopy(reference))
            made = [torch.optim.AdamW(m.parameters(), lr=1e-3, **options) for m in (reference, sharded)]
            for step in range(3):
                norms = [_step(m, batch(step), o) for m, o in zip((reference, sharded), made, strict=True)]
                assert float(norms[0]) > 5 * CLIP
                assert_close(norms[0], norms[1], f"norm, {options}")
                assert_same_parameters(reference, sharded, 1e-9)


def test_optimizers_and_clipping(pool):
    pool.run(optimizers, world=2)


def test_optimizers_and_clipping_on_four_ranks(pool):
    pool.run(optimizers, world=4)


def two_by_two(fields, checkpoint):
    """A 2x2 mesh, each replica with its half, against the unsharded model on the whole batch."""
    reference = build(kv_heads=1, checkpoint=checkpoint)
    sharded = copy.deepcopy(reference)
    assert shardcore.shard(sharded, policy=TinyPolicy, tp=2, **fields) is sharded
    context = context_of(sharded)
    made = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (reference, sharded)]
    own = slice(2 * context.replica, 2 * context.replica + 2)
    for step in range(2):
        for micro in (0, 1):
            ids = batch(10 * step + micro, rows=4)
            _step(reference, ids)
            _step(sharded, ids[own])
        shardcore.reduce_partial_gradients(sharded)
        assert_same_gradients(reference, sharded)
        norms = [nn.utils.clip_grad_norm_(m.parameters(), CLIP) for m in (reference, sharded)]
        assert_close(norms[0], norms[1], "norm")
        for optimizer in made:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_parameters(reference, sharded)
    kinds = {tuple(type(p).__name__ for p in parameter.placements) for parameter in sharded.parameters()}
    replicated = fields.get("dp_replicate_size", 1) == 2
    assert any("Shard" in kind[0] for kind in kinds) != replicated, kinds


def all_two_by_two():
    two_by_two({"dp": 2}, None)
    two_by_two({"dp": 2, "dp_replicate_size": 2}, "non-reentrant")
    two_by_two({"dp": 2, "partial_gradients": "deferred"}, "reentrant")


@pytest.mark.four
def test_tensor_and_data_parallel_equal_the_unsharded_model(pool):
    pool.run(all_two_by_two, world=4)


def data_parallel_only():
    reference = build()
    sharded = copy.deepcopy(reference)
    shardcore.shard(sharded, policy=TinyPolicy, tp=1, dp=2)
    half = dist.get_rank()
    ids = batch(rows=4)
    _step(reference, ids)
    _step(sharded, ids[2 * half : 2 * half + 2])
    assert_same_gradients(reference, sharded)
    assert isinstance(sharded.head, nn.Linear)


def small_sizes():
    """H41: 2 labels and 5 rows on 4 ranks, two of them data parallel, under FSDP2."""
    reference = build(vocab=5, hidden=16, heads=4, kv_heads=1, inner=8)
    reference.head = nn.Linear(16, 2, dtype=torch.float64)
    sharded = copy.deepcopy(reference)
    shardcore.shard(sharded, policy=TinyPolicy, tp=2, dp=2)
    replica = context_of(sharded).replica
    ids = batch(rows=4, vocab=5)
    reference(ids).tanh().mean().backward()
    sharded(ids[2 * replica : 2 * replica + 2]).tanh().mean().backward()
    assert_same_gradients(reference, sharded)

    sharded = copy.deepcopy(reference)
    shardcore.shard(sharded, policy=TinyPolicy, tp=4)
    sharded.zero_grad()
    reference.zero_grad()
    for model in (reference, sharded):
        model(ids).tanh().mean().backward()
    assert_same_gradients(reference, sharded)
    assert sharded.head.weight.to_local().shape == (2, 16)
    assert sharded.model.embed.weight.to_local().shape == (5, 16)


def test_sizes_that_leave_ranks_empty(pool):
    pool.run(small_sizes, world=4)


def test_data_parallel_alone(pool):
    pool.run(data_parallel_only, world=2)


def repointed():
    reference, model = build(), build()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if "bias" not in n], "lr": 3e-3},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    lists = [group["params"] for group in optimizer.param_groups]
    twin = torch.optim.AdamW(
        [
            {"params": [p for n, p in reference.named_parameters() if "bias" in n], "weight_decay": 0.0},
            {"params": [p for n, p in reference.named_parameters() if "bias" not in n], "lr": 3e-3},
        ],
        lr=1e-3,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shardcore.shard(model, policy=TinyPolicy, tp=2, optimizer=optimizer)
    assert [group["params"] for group in optimizer.param_groups] == lists
    assert all(group["params"] is kept for group, kept in zip(optimizer.param_groups, lists, strict=True))
    assert {id(p) for held in lists for p in held} == {id(p) for p in model.parameters()}
    assert optimizer.param_groups[0]["weight_decay"] == 0.0
    for step in range(2):
        for m, o in ((reference, twin), (model, optimizer)):
            _step(m, batch(step), o)
        assert_same_parameters(reference, model)


def stale():
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(StaleOptimizerWarning) as caught:
        shardcore.shard(model, policy=TinyPolicy, tp=2)
    assert str(caught[0].message) == (
        "SGD was made before shard() and still holds 50 of the old parameters (first: model.positions): its steps "
        "would change nothing, and are refused. Make it after shard(), or pass it as shard(..., optimizer=optimizer)."
    )
    with pytest.raises(ConfigError, match=r"this SGD was made before shard\(\) .*first: model\.positions"):
        optimizer.step()
    optimizer.param_groups[0]["params"] = list(model.parameters())  # by hand, as some do
    _step(model, batch(), optimizer)
    assert caught[0].filename == __file__
    assert optimizer.param_groups

    tied = build(tied=True)
    assert held_elsewhere(tied) == {}  # so that nothing has to be looked for
    bias = tied.model.norm.bias
    assert held_elsewhere(tied) == {id(bias): "model.norm.bias"}
    torch.utils.swap_tensors(bias, nn.Parameter(torch.zeros_like(bias)))  # as weights from a file are filled in

    model = build()
    optimizer = torch.optim.AdamW(model.parameters())
    _step(model, batch(), optimizer)
    with pytest.raises(NotSupportedError, match="this AdamW holds state already, which cannot be re-pointed"):
        shardcore.shard(model, policy=TinyPolicy, tp=2, optimizer=optimizer)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(2)), *model.parameters()])
    with pytest.raises(ConfigError, match="optimizer= holds 1 parameters that are not the model's"):
        shardcore.shard(model, policy=TinyPolicy, tp=2, optimizer=foreign)
    fresh = torch.optim.SGD(model.parameters())
    mine = foreign if dist.get_rank() == 1 else fresh
    with pytest.raises(ConfigError if dist.get_rank() == 1 else AgreementError, match="optimizer= holds 1 param"):
        shardcore.shard(model, policy=TinyPolicy, tp=2, optimizer=mine)


def gradients_carried():
    """Gradients, attributes and requires_grad from before sharding are still there."""
    reference, model = build(), build()
    for m in (reference, model):
        _step(m, batch())
    model.head.weight.requires_grad_(False)
    model.head.bias.tag = "kept"
    model.model.norm.eval()
    shard(model)
    assert not model.head.weight.requires_grad
    assert model.head.bias.tag == "kept"
    assert not model.model.norm.training
    assert_same_gradients(reference, model)


def around_optimizers():
    repointed()
    stale()
    gradients_carried()


def test_optimizers_made_before(pool):
    pool.run(around_optimizers, world=2)


def under_torchrun():
    assert not dist.is_initialized()
    model = build()
    reference = copy.deepcopy(model)
    shardcore.shard(model, ShardConfig(tensor_parallel_size=2), policy=TinyPolicy)
    assert dist.get_backend() == "gloo"
    assert_close(reference(batch()), model(batch()), "output")
    return dist.get_world_size()


def test_the_process_group_is_started_from_torchruns_variables(pool):
    assert pool.run(under_torchrun, world=2, process_group=False) == [2, 2]


def test_outside_torchrun(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    model = build()
    for fields, ranks in (({"tp": 2}, 2), ({"dp": 4}, 4), ({"dp_replicate_size": 3}, 3)):
        with pytest.raises(ConfigError) as caught:
            shardcore.shard(model, policy=TinyPolicy, **fields)
        assert str(caught.value) == (
            f"sharding over {ranks} ranks needs that many processes, and this one was started alone. Start it with: "
            f"torchrun --nproc-per-node {ranks} your_script.py (or call torch.distributed.init_process_group first)"
        )
    assert not dist.is_initialized()
    assert shardcore.shard(model, policy=TinyPolicy) is model
    assert not dist.is_initialized()


def test_arguments_that_are_no_configuration():
    with pytest.raises(ConfigError, match=r"wanted a ShardConfig, got 2; sizes are given by name: tp=2, dp=2"):
        shardcore.shard(build(), 2, policy=TinyPolicy)
    with pytest.raises(ConfigError, match="unknown configuration field 'tensor'"):
        shardcore.shard(build(), policy=TinyPolicy, tensor=2)
