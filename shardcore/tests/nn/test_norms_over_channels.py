"""Layer norms over features of which each rank has some: those of all heads, and the channels of an MLP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny import randomize, shard
from torch import Tensor, nn

from shardcore.compile import compile_plan
from shardcore.config import ShardConfig
from shardcore.errors import PlanError
from shardcore.policy import ModulePolicy, Policy
from shardcore.styles import attribute, norm_over_heads, per_rank, region
from shardcore_testing.parity import assert_close, assert_same_gradients

WIDTH, HEADS, INNER = 12, 6, 10
FAR = 30.0  # from zero, where a difference of squares would have nothing left in float32


class Net(nn.Module):
    """Attention whose output is normalized before it is projected, and an MLP that does likewise (BEiT-3)."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.heads = HEADS
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-3, bias=bias)
        self.up, self.inner, self.down = (
            nn.Linear(WIDTH, INNER),
            nn.LayerNorm(INNER, bias=bias),
            nn.Linear(INNER, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        heads = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(self.norm(heads))
        return x + self.down(self.inner(self.up(x).tanh() + FAR))


class NetPolicy(Policy):
    def module_policy(self) -> ModulePolicy:
        return {
            "Net": [
                region(enter=("q", "k", "v"), col=("q", "k", "v"), row="out", unit="head", heads="heads"),
                norm_over_heads("norm", of="channel"),
                attribute("heads", per_rank),
                region(enter="up", col="up", row="down"),
                norm_over_heads("inner", of="channel"),
            ]
        }


def trained(options: dict[str, Any], dtype: torch.dtype) -> None:
    native = Net(**options)
    randomize(native.to(dtype))
    model = shard(copy.deepcopy(native), NetPolicy)
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0)).to(dtype)
    outs = [m(x) for m in (native, model)]
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_close(*outs, "output", tolerance)
    for out in outs:
        out.sin().sum().backward()
    assert_same_gradients(native, model, tolerance)


@pytest.mark.parametrize("world", [2, 3])
def test_every_gradient(pool, world):
    pool.run(trained, {}, torch.float64, world=world)


def test_other_forms(pool):
    pool.run(trained, {"bias": False}, torch.float64, world=2)
    pool.run(trained, {}, torch.float32, world=2)


def test_norms_that_are_none():
    class Wrong(NetPolicy):
        def module_policy(self) -> ModulePolicy:
            return {"Net": [*super().module_policy()["Net"][:-1], norm_over_heads("down", of="channel")]}

    with pytest.raises(PlanError, match=r"Linear is no torch.nn.LayerNorm over one dim, and rms= was not said"):
        compile_plan(Wrong, Net(), ShardConfig.of(tp=2).resolve(2), device_type="cpu")
