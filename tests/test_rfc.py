"""PyTorch's RFC of tensor parallelism: its snippets as they are, beside whole modules."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention

import shardcore_shardformer.tensor_parallel as tp
from shardcore.errors import ConfigError, PlanError
from shardcore.nn import fsdp_placement
from shardcore_testing.parity import assert_close, assert_same_gradients

pytest.importorskip("shard_torch")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        q, k, v = (linear(x).unflatten(-1, (-1, 8)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        return self.out(scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x):
        return self.down(self.up(x).relu())


class DemoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.layer_norm, self.mlp = Attention(), nn.LayerNorm(32), MLP()

    def forward(self, x):
        return self.mlp(self.layer_norm(self.attn(x)))


def _stack(*sizes):
    linears = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*(layer for linear in linears for layer in (linear, nn.ReLU())))


def _transformer():
    return nn.Transformer(64, 16, 3, 2, 96, dropout=0.0, batch_first=True)


PAIR = tp.PairwiseParallelStyle()
MODULES = {
    "colwise": (lambda: nn.Linear(8, 16), tp.ColwiseParallel(), 1),
    "rowwise": (lambda: nn.Linear(16, 8), tp.RowwiseParallel(), 1),
    "even": (lambda: _stack(8, 16, 8, 16, 8), PAIR, 1),
    "odd": (lambda: _stack(8, 16, 8, 16), PAIR, 1),
    "mlp": (MLP, PAIR, 1),
    "attention": (lambda: nn.MultiheadAttention(32, 4, batch_first=True), PAIR, 3),
    "transformer": (_transformer, PAIR, 2),
    "custom": (DemoModel, {"attn": PAIR, "mlp": PAIR}, 1),
    "inside": (lambda: nn.ModuleDict({"a": nn.MultiheadAttention(32, 4)}), {"a": PAIR}, 0),
    "words": (DemoModel, {"attn": PAIR, "mlp.up": "colwise", "mlp.down": "rowwise"}, 1),
}


def _args(reference, count, rows):
    width = next(p.size(-1) for p in reference.parameters() if p.ndim > 1)
    return [torch.randn(rows, 5, width, generator=torch.Generator().manual_seed(1)).double()] * count


def _same(name, swapped, divide=tp.parallelize_module):
    build, plan, count = MODULES[name]
    torch.manual_seed(0)
    reference = build().double()
    module = copy.deepcopy(reference)
    mesh = DeviceMesh("cpu", torch.arange(2))
    given = (plan, mesh) if swapped else (mesh, plan)
    assert divide(module, *given) is module
    if count:
        outs = [m(*_args(reference, count, 2)) for m in (reference, module)]
        wanted, got = (out[0] if isinstance(out, tuple) else out for out in outs)
        assert_close(wanted, got, "output")
        for out in (wanted, got):
            out.square().mean().backward()
        assert_same_gradients(reference, module)


@pytest.mark.parametrize("name", MODULES)
def test_the_snippets(pool, name):
    pool.run(_same, name, swapped=name != "mlp")


LOW_LEVEL = {
    "mlp": tp._parallelize_mlp,
    "even": tp._parallelize_mlp,
    "attention": tp._parallelize_multihead_attn,
    "colwise": tp._parallelize_linear,
}


def _low_level():
    for name, divide in LOW_LEVEL.items():
        _same(name, swapped=False, divide=lambda module, mesh, plan, divide=divide: divide(module, mesh))


def test_the_low_level_names(pool):
    pool.run(_low_level)


def _two_dims():
    torch.manual_seed(0)
    reference = _transformer().double()
    model = copy.deepcopy(reference)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2), mesh_dim_names=("dp", "tp"))
    tp.parallelize_module(model, PAIR, mesh, tp_mesh_dim=1)
    fully_shard(model, mesh=mesh["dp"], shard_placement_fn=fsdp_placement)
    rows = _args(reference, 2, 4)
    own = slice(2 * mesh["dp"].get_local_rank(), 2 * mesh["dp"].get_local_rank() + 2)
    reference(*rows).square().mean().backward()
    model(*(x[own] for x in rows)).square().mean().backward()
    assert_same_gradients(reference, model)


@pytest.mark.nightly
def test_replicas_by_the_callers_own_fsdp(pool):
    pool.run(_two_dims, world=4)


def _prepared():
    torch.manual_seed(0)
    reference = MLP().double()
    module = copy.deepcopy(reference)
    style = tp.PairwiseParallel(lambda x, mesh, dim: x * mesh.size(dim), lambda x, mesh, dim: -x)
    tp.parallelize_module(module, style, DeviceMesh("cpu", torch.arange(2)))
    (x,) = _args(reference, 1, 2)
    assert_close(-reference(2 * x), module(x), "output")


def test_a_style_with_preparations_of_its_own(pool):
    pool.run(_prepared)


def _refused():
    mesh = DeviceMesh("cpu", torch.arange(2))
    with pytest.raises(ConfigError, match="tp_mesh_dim=1; tensor-parallel ranks are neighbours"):
        tp.parallelize_module(MLP(), PAIR, mesh, tp_mesh_dim=1)
    model = DemoModel()
    with pytest.raises(PlanError, match="which does not compute the same"):
        tp.parallelize_module(model, {"layer_norm": tp.ColwiseParallel(lambda x, mesh, dim: x)}, mesh)
    assert not model.layer_norm._forward_pre_hooks  # nothing was changed


def test_what_is_refused(pool):
    pool.run(_refused)
