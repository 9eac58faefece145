"""A decoder whose attention has queries, keys and values in one linear, in any order, and norms over all heads.

Its forward counts query heads by its configuration, as that of Phi-3 does, and KV heads by an attribute.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from tiny import randomize, shard
from torch import Tensor, nn

from shardcore.policy import Heads, ModulePolicy, Policy
from shardcore.styles import (
    attribute,
    head,
    local_kv_heads,
    norm,
    norm_over_heads,
    per_rank,
    region,
    replicate,
    segments,
    vocab,
)

VOCAB = 23


@dataclass
class Config:
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 5
    by: str = "projection"
    over_heads: bool = False
    layers: int = 2
    bias: bool = True


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.num_kv_heads, self.head_dim = config.kv_heads, config.head_dim
        width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.qkv = nn.Linear(12, width + 2 * kv_width, bias=config.bias)
        self.q_norm = RMSNorm(width) if config.over_heads else nn.Identity()
        self.k_norm = RMSNorm(kv_width) if config.over_heads else nn.Identity()
        self.out = nn.Linear(width, 12, bias=config.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = self._split(self.qkv(hidden))
        q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.view(*t.shape[:2], -1, self.head_dim).transpose(1, 2) for t in (q, k, v))
        k, v = (t.repeat_interleave(self.config.heads // self.num_kv_heads, 1) for t in (k, v))
        weights = (q @ k.transpose(-1, -2)).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def _split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = self.config.heads, self.num_kv_heads, self.head_dim
        if self.config.by == "projection":
            return qkv.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        groups = qkv.view(*qkv.shape[:2], kv_heads, heads // kv_heads + 2, dim)
        return groups[..., :-2, :].flatten(2), groups[..., -2, :].flatten(2), groups[..., -1, :].flatten(2)


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attention = Attention(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class FusedLM(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCAB, 12)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(12, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class FusedPolicy(Policy):
    checks = (Heads("heads", kv="kv_heads", uneven=True),)

    def module_policy(self) -> ModulePolicy:
        fused = segments("attention.qkv", ("query", "key", "value"), by=self.model.config.by)
        over_heads = [
            norm_over_heads("attention.q_norm", rms="eps"),
            norm_over_heads("attention.k_norm", rms="eps", of="key"),
        ]
        return {
            "FusedLM": [vocab("embed"), head("head")],
            "Block": [
                norm("norm"),
                region(enter="attention", col=fused, row="attention.out", unit="head"),
                attribute("attention.config.heads", per_rank),
                attribute("attention.num_kv_heads", local_kv_heads),
                *(over_heads if self.model.config.over_heads else [replicate("attention.q_norm", "attention.k_norm")]),
            ],
        }


def twins(*, fields: dict[str, Any] | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Return an unsharded model and its sharded copy."""
    model = FusedLM(Config(**options)).double()
    randomize(model)
    return model, shard(copy.deepcopy(model), FusedPolicy, **(fields or {}))


def step(model: nn.Module, seed: int = 0, rows: slice = slice(None)) -> Tensor:
    """Run forward and backward, and return the loss."""
    ids = torch.randint(0, VOCAB, (4, 7), generator=torch.Generator().manual_seed(seed))[rows]
    loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(1, 1).flatten())
    loss.backward()
    return loss
