"""Heads that the ranks do not divide, and heads of different projections in one linear: each rank gets what it uses."""

from __future__ import annotations

import copy

import pytest
import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fused_heads import FusedPolicy, step, twins
from needs import FUSED, TRACES
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardcore
from shardcore.comm.dtensor_params import local_tensor
from shardcore.nn import ColumnLinear, RowLinear
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters

SIZES = [(6, 6), (6, 3), (6, 2), (6, 1), (12, 4), (4, 4)]


def trains(by, **options):
    for heads, kv_heads in SIZES:
        reference, sharded = twins(heads=heads, kv_heads=kv_heads, by=by, **options)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, sharded)]
        for turn in range(2):
            for seed in (2 * turn, 2 * turn + 1):
                assert_close(step(reference, seed), step(sharded, seed), f"loss of {heads} and {kv_heads} heads")
            assert_same_gradients(reference, sharded)
            norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (reference, sharded)]
            assert_close(norms[0], norms[1].full_tensor(), "gradient norm")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_parameters(reference, sharded)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("by", [pytest.param("projection", marks=FUSED), "group"])
def test_training_in_every_order_of_features(pool, by, world):
    """Even heads, uneven ones, KV heads shared by ranks, and one of all; in one weight."""
    pool.run(trains, by, world=world)


@FUSED
@pytest.mark.parametrize("world", [2, 3, 4])
def test_norms_over_all_heads(pool, world):
    pool.run(trains, "projection", over_heads=True, world=world)


class Uneven(tiny.FixedViewsPolicy):
    checks = (tiny.Heads("heads", kv="kv_heads", uneven=True),)


def separate():
    for heads, kv_heads in ((6, 6), (6, 2), (4, 4), (16, 4)):
        for options in ({}, {"checkpoint": "reentrant"}, {"checkpoint": "non-reentrant"}):
            config = {"heads": heads, "kv_heads": kv_heads, "hidden": 48, "fixed_views": True, **options}
            reference, sharded = tiny.twins(Uneven, **config)
            for seed in (0, 1):
                ids = tiny.batch(seed)
                losses = [m(ids, labels=ids.roll(1, 1)) for m in (reference, sharded)]
                assert_close(losses[0], losses[1], f"loss of {heads} and {kv_heads} heads")
                for loss in losses:
                    loss.backward()
            assert_same_gradients(reference, sharded)


@pytest.mark.parametrize("world", [3, 4])
def test_uneven_heads_of_separate_linears(pool, world):
    pool.run(separate, world=world)


def placed():
    _, sharded = twins(heads=6, kv_heads=2)
    attention = sharded.layers[0].attention
    assert isinstance(attention.qkv, ColumnLinear)
    assert isinstance(attention.out, RowLinear)
    assert attention.qkv.weight.placements == attention.qkv.bias.placements == (Shard(0),)
    assert attention.out.weight.placements == (Shard(1),)
    assert attention.out.bias.placements == (Replicate(),)
    held = [local_tensor(p).numel() for p in (attention.qkv.weight, attention.out.weight)]
    whole = [p.numel() for p in (attention.qkv.weight, attention.out.weight)]
    assert all(4 * part <= size + 4 * 12 for part, size in zip(held, whole, strict=True))
    assert "rows exchanged" in repr(attention.qkv)
    heads = [(2, 1), (2, 2), (1, 1), (1, 1)][dist.get_rank()]
    assert (attention.config.heads, attention.num_kv_heads) == heads
    assert (sharded.config.heads, sharded.config.kv_heads) == (6, 2)


def test_a_rank_holds_its_part_and_uses_its_heads(pool):
    pool.run(placed, world=4)


def sends(fields):
    """Return what one step sends, and how many of these the plan has said."""
    _, sharded = twins(heads=6, kv_heads=2, fields=fields)
    with Collectives() as forward:
        loss = sharded(torch.arange(7)[None]).sum()
    with Collectives() as backward:
        loss.backward()
    return forward.counts["alltoall_base"], backward.counts["alltoall_base"]


def test_each_region_exchanges_once_for_its_columns_and_once_for_its_row(pool):
    layers = 2
    assert pool.run(sends, {}, world=4)[0] == (2 * layers, 2 * layers)
    assert pool.run(sends, {}, world=2)[0] == (layers, layers), "the row linear holds whole heads"


def inference():
    reference, sharded = twins(heads=6, kv_heads=2, fields={"inference_only": True})
    ids = torch.arange(7)[None]
    with torch.no_grad(), Collectives() as sent:
        assert_close(reference(ids), sharded(ids), "logits")
    assert sharded.layers[0].attention.qkv.weight.placements == (Replicate(),)
    assert sent.counts["alltoall_base"] == 0


def test_inference_sends_no_weights_of_heads_that_are_even(pool):
    pool.run(inference, world=2)


def saves(folder):
    _, sharded = twins()
    dcp.save(sharded.state_dict(), checkpoint_id=folder)


def loads(folder):
    reference, sharded = twins(by="projection")
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    state = sharded.state_dict()
    dcp.load(state, checkpoint_id=folder)
    sharded.load_state_dict(state)
    assert_same_parameters(reference, sharded)


def test_a_checkpoint_fits_any_number_of_ranks(pool, tmp_path):
    pool.run(saves, tmp_path, world=4)
    pool.run(loads, tmp_path, world=3)


def replicas():
    reference, _ = twins(heads=6, kv_heads=1, fields={"tensor_parallel_size": 4})
    sharded = shardcore.shard(copy.deepcopy(reference), policy=FusedPolicy, tp=2, dp=2)
    half = dist.get_rank() // 2
    step(reference)
    step(sharded, rows=slice(2 * half, 2 * half + 2))
    assert_same_gradients(reference, sharded)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")  # any linear does
def test_over_two_replicas(pool):
    pool.run(replicas, world=4)


def frozen():
    for names in (("qkv.weight",), ("qkv.bias",), ("qkv",)):
        reference, sharded = twins(heads=6, kv_heads=2)
        for model in (reference, sharded):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(not any(part in name for part in names))
            step(model)
        assert_same_gradients(reference, sharded)


def test_frozen_parameters(pool):
    pool.run(frozen, world=3)


def compiled():
    reference, sharded = twins(heads=6, kv_heads=2, layers=1)
    for layer in sharded.layers:
        layer.compile(backend="aot_eager")
    for seed in (0, 1):
        assert_close(step(reference, seed), step(sharded, seed), "loss")
    assert_same_gradients(reference, sharded)


@TRACES
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo does it
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # so it does
def test_compiled(pool):
    pool.run(compiled, world=4)


def too_many():
    with pytest.raises(shardcore.PlanError, match=r"2 query heads \(heads\) cannot be split over 3 ranks: each needs"):
        twins(heads=2, kv_heads=1)

    class Even(FusedPolicy):
        checks = (tiny.Heads("heads", kv="kv_heads"),)

    reference, _ = twins(heads=6, kv_heads=2)
    with pytest.raises(shardcore.PlanError, match="one number has to divide the other"):
        tiny.shard(copy.deepcopy(reference), Even)


def test_what_cannot_be_had_is_refused(pool):
    pool.run(too_many, world=3)
