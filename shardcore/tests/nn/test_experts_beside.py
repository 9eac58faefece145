"""Mixtures of other shapes: a router beside its experts, a block that returns its tokens flat, heads of one module."""

from __future__ import annotations

import copy

import torch.nn.functional as F
from experts_net import WIDTH, Mixture, Router, Stacked, batch
from needs import FUSED
from tiny import randomize
from torch import nn

import shardcore
from shardcore import Policy
from shardcore.policy import Heads
from shardcore.styles import enter_arg, experts, norm, partial, region, replicate, sequence
from shardcore_testing.parity import assert_close, assert_same_gradients


class Beside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.experts = nn.LayerNorm(WIDTH), Router(), Stacked(False)

    def forward(self, x):
        flat = self.norm(x).view(-1, WIDTH)
        _, weights, places = self.gate(flat)
        return x + self.experts(flat, places, weights).view(x.shape)


class BesidePolicy(Policy):
    def module_policy(self):
        mixture = experts("experts", weights="", router=None)
        return {"Beside": [norm("norm"), replicate("gate"), enter_arg("experts", "top_k_weights"), mixture]}


class FlatBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixture = nn.LayerNorm(WIDTH), FlatMixture("stacked")

    def forward(self, x):
        return x + self.mixture(self.norm(x)).view(x.shape)


class FlatMixture(Mixture):
    def forward(self, hidden, scale=None):
        return super().forward(hidden).view(-1, WIDTH)


class FlatStack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList(FlatBlock() for _ in range(2)), nn.LayerNorm(WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class FlatPolicy(Policy):
    def module_policy(self):
        shared = {"shared_col": ("shared_expert.w1", "shared_expert.w3"), "shared_row": "shared_expert.w2"}
        mixture = [experts("mixture", **shared), partial("mixture.shared_gate")]
        return {
            "FlatStack": [norm("last"), sequence(scatter="blocks[0]", gather="last")],
            "FlatBlock": [norm("norm"), *mixture],
        }


class Attention(nn.Module):
    def __init__(self, kv) -> None:
        super().__init__()
        self.kv, self.q, self.k, self.o = kv, nn.Linear(6, 8), nn.Linear(6, 2 * kv), nn.Linear(8, 6)

    def forward(self, x):
        q, k = self.q(x).unflatten(-1, (-1, 2)), self.k(x).unflatten(-1, (-1, 2))
        return self.o((q * F.silu(k).repeat_interleave(q.size(-2) // k.size(-2), -2)).flatten(-2))


class TwoKinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Attention(4), Attention(1)

    def forward(self, x):
        return x + self.one(x) + self.other(x)


class TwoKindsPolicy(Policy):
    def module_policy(self):
        parts = (self.model.one, self.model.other)
        return {part: [region(enter="", col="q", kv="k", row="o", heads=Heads(4, kv=part.kv))] for part in parts}


def compares(kind, policy, fields):
    reference = kind().double()
    randomize(reference)
    model = shardcore.shard(copy.deepcopy(reference), policy=policy, **fields)
    wanted, got = reference(batch()), model(batch())
    assert_close(wanted, got, "output")
    wanted.pow(3).sum().backward(), got.pow(3).sum().backward()
    assert_same_gradients(reference, model)


@FUSED
def test_a_router_beside_its_experts(pool):
    pool.run(compares, Beside, BesidePolicy, {}, world=2)


@FUSED
def test_a_block_that_returns_its_tokens_flat(pool):
    for fields in ({}, {"enable_sequence_parallelism": True}):
        pool.run(compares, FlatStack, FlatPolicy, fields, world=2)


def test_heads_of_one_module(pool):
    pool.run(compares, TwoKinds, TwoKindsPolicy, {}, world=2)
