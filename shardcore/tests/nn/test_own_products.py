"""Linears with a weight of (in, out), rewritten linears and scaled embeddings, split and trained."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
from needs import FUSED
from own_products import HIDDEN, InOut, Model, ModelPolicy, Rewritten, Scaled, ids
from torch import nn
from torch.distributed.tensor import Shard

import shardcore
from shardcore.errors import PlanError
from shardcore.nn import ColumnLinear, RowLinear, SegmentedLayout, VocabEmbedding
from shardcore.styles import col, head, replicate, row
from shardcore_testing.observing import Collectives
from shardcore_testing.parity import assert_close, assert_same_gradients, assert_same_parameters, whole

pytestmark = FUSED

LINEARS = {"in-out": InOut, "rewritten": Rewritten}


def _loss(model, seed=0, rows=slice(None)):
    out = model(ids(seed)[rows])
    return (out.tanh() * torch.linspace(-1, 2, out.size(-1), dtype=out.dtype)).mean()


def _shard(model, **options):
    return shardcore.shard(model, policy=ModelPolicy, **options)


def _parity(linear, fields):
    reference = Model(linear)
    model = _shard(copy.deepcopy(reference), tp=dist.get_world_size(), **fields)
    for seed in range(2):
        wanted, got = _loss(reference, seed), _loss(model, seed)
        assert_close(wanted, got, "loss", 1e-12)
        wanted.backward()
        got.backward()
    if fields:
        shardcore.reduce_partial_gradients(model)
    assert_same_gradients(reference, model)
    with torch.no_grad():
        assert_close(reference(ids()), model(ids()), "output", 1e-12)


@pytest.mark.parametrize("linear", LINEARS.values(), ids=LINEARS)
@pytest.mark.parametrize("world", [2, 4])
def test_gradients(pool, linear, world):
    pool.run(_parity, linear, {}, world=world)


def test_deferred_gradients(pool):
    pool.run(_parity, InOut, {"partial_gradients": "deferred"})


def _sent():
    model = _shard(Model(), tp=2)
    block = model.blocks[0]
    with Collectives() as ahead:
        out = block(torch.randn(2, 5, HIDDEN, dtype=torch.float64).requires_grad_())
    with Collectives() as back:
        out.sum().backward()
    return len(ahead.names), len(back.names)


def test_two_collectives_forward_and_three_backward(pool):
    # One of those in the backward is that of the fused bias, which is whole.
    assert pool.run(_sent) == [(2, 3)] * 2


def _kept():
    reference = Model()
    model = _shard(copy.deepcopy(reference), tp=2)
    block = model.blocks[0]
    assert isinstance(block.attention.qkv, InOut)
    assert not isinstance(block.attention.qkv, nn.Linear)
    assert isinstance(block.mlp.up, ColumnLinear)
    assert isinstance(model.words, Scaled)
    assert isinstance(model.words, VocabEmbedding)
    assert block.mlp.up.weight.placements == (Shard(1),)
    assert block.mlp.down.weight.placements == (Shard(0),)
    assert "weight=(in, out), tp=2" in repr(block.mlp.down)
    assert {n: t.shape for n, t in model.state_dict().items()} == {
        n: t.shape for n, t in reference.state_dict().items()
    }
    # Whole tensors are split as they are loaded.
    other = Model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-1.5)
    model.load_state_dict(other.state_dict())
    assert_same_parameters(other, model, 0.0)
    local = block.attention.qkv.weight.to_local()
    runs = [other.blocks[0].attention.qkv.weight[:, at : at + HIDDEN // 2] for at in range(dist.get_rank() * 8, 48, 16)]
    assert local.equal(torch.cat(runs, 1))
    twin = copy.deepcopy(model)
    assert_close(_loss(model), _loss(twin), "loss of a copy", 0.0)


def test_what_is_kept(pool):
    pool.run(_kept)


def _data_parallel():
    reference = Model()
    model = _shard(copy.deepcopy(reference), tp=2, dp=2)
    place = model.blocks[0].attention.qkv.weight.placements
    assert place[0] == Shard(0)
    assert place[1].dim == 1
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    half = slice(0, 2) if dist.get_rank() < 2 else slice(2, 4)
    for seed in range(2):
        _loss(reference, seed).backward()
        _loss(model, seed, half).backward()
        assert_same_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters(reference, model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
def test_fsdp_on_dim_0_of_the_same_weight(pool):
    pool.run(_data_parallel, world=4)


def _save(folder):
    model = _shard(Model(), tp=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _loss(model).backward()
    optimizer.step()
    shardcore.save_checkpoint(folder, model, optimizer)


def _load(folder, fields):
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    reference = Model()
    wanted = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    _loss(reference).backward()
    wanted.step()
    model = Model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model = _shard(model, **fields)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    shardcore.load_checkpoint(folder, model, optimizer)
    assert_same_parameters(reference, model)
    moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert_close(wanted.state[parameter]["exp_avg"], whole(moments[name]), name, 1e-12)


@pytest.mark.parametrize("fields", [{"tp": 4}, {"tp": 2, "dp": 2}], ids=["tp4", "tp2-fsdp2"])
def test_checkpoints_fit_other_meshes(pool, tmp_path, fields):
    pool.run(_save, str(tmp_path / "saved"))
    pool.run(_load, str(tmp_path / "saved"), fields, world=4)


def _compiled():
    reference = Model()
    model = _shard(copy.deepcopy(reference), tp=2)
    for block in model.blocks:
        block.compile(backend="aot_eager")
    for seed in range(2):
        _loss(reference, seed).backward()
        _loss(model, seed).backward()
    assert_same_gradients(reference, model)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated:DeprecationWarning")  # dynamo does
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # dynamo asks
def test_compiled_blocks(pool):
    pool.run(_compiled)


def _alone():
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64)
    for outputs in (8, 5):
        reference = InOut(6, outputs).double()
        with torch.no_grad():
            for parameter in reference.parameters():
                parameter.normal_()
        for swap, options in ((ColumnLinear, {"gather_output": True}), (RowLinear, {"parallel_input": False})):
            module = swap.from_native_module(copy.deepcopy(reference), **options)
            mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            got, wanted = module(mine), reference(theirs)
            assert_close(wanted, got, "output", 1e-12)
            got.tanh().sum().backward()
            wanted.tanh().sum().backward()
            assert_close(theirs.grad, mine.grad, "input", 1e-12)
            assert_same_gradients(reference, module)
            reference.zero_grad()


def test_modules_alone(pool):
    pool.run(_alone)


def _problems(*rows):
    class Other(ModelPolicy):
        def module_policy(self):
            return {"Model": [replicate("words", "blocks"), *rows]}

    model = Model()
    model.head = InOut(HIDDEN, 37)
    with pytest.raises(PlanError) as caught:
        shardcore.compile_plan(Other, model, shardcore.ShardConfig(tensor_parallel_size=2))
    return str(caught.value)


def test_heads_of_another_class_are_refused():
    assert "heads of other classes are not split yet" in _problems(head("head"))


def test_other_modules_are_refused():
    said = _problems(replicate("head"), col("blocks.0.norm"), row("blocks.1.norm"))
    assert "ColumnLinear replaces torch.nn.modules.linear.Linear, got torch.nn.modules.normalization.LayerNorm" in said
    assert "LayerNorm has the parameters bias, weight" in said


def test_segments_on_dim_1():
    layout = SegmentedLayout(3, 1)
    assert str(layout) == "3 segments, each split on dim 1"
    assert [layout.shape((4, 15), 2, rank) for rank in range(2)] == [(4, 9), (4, 6)]
