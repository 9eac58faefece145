"""Blocks with a root-mean-square norm written out, their policy, and a comparison of two such nets."""

from __future__ import annotations

import torch
from tiny import randomize
from torch import nn

from shardcore.policy import Policy, Stages
from shardcore.styles import norm, region
from shardcore_testing.parity import assert_close, assert_same_gradients


class RootMeanSquare(nn.Module):
    """Such a norm written out, as in transformers."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = 1e-3

    def forward(self, x):
        kept = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
        kept = kept * torch.rsqrt(kept.pow(2).mean(-1, keepdim=True) + self.epsilon)
        return self.weight * kept.to(x.dtype)


class RmsBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RootMeanSquare(16)
        self.up = nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


class RmsNet(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(RmsBlock() for _ in range(blocks))
        self.last = nn.LayerNorm(16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class RmsPolicy(Policy):
    stages = Stages(blocks="blocks", last="last")
    rms = "epsilon"

    def module_policy(self):
        return {
            "RmsNet": [norm("last")],
            "RmsBlock": [norm("norm", rms=self.rms), region(col="up", row="down")],
        }


def rms_net(dtype=torch.float64):
    net = RmsNet().to(dtype)
    randomize(net)
    return net


def x_of(seed=0, dtype=torch.float64):
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def compare(reference, sharded, tolerance=1e-9):
    dtype = next(reference.parameters()).dtype
    x, y = x_of(dtype=dtype).requires_grad_(), x_of(dtype=dtype).requires_grad_()
    wanted, got = reference(x), sharded(y)
    assert_close(wanted, got, "output", tolerance)
    (wanted * x_of(1, dtype)).sum().backward()
    (got * x_of(1, dtype)).sum().backward()
    assert_close(x.grad, y.grad, "input gradient", tolerance)
    assert_same_gradients(reference, sharded, tolerance)
