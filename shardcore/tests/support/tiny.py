"""A small decoder in plain torch, its policy, and what the tests of the core do with both.

Grouped-query attention with norms on queries and keys, a gated MLP, biases everywhere, dropout inside and outside of
regions: every kind of parameter that the core shards, without transformers.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

from shardcore.apply.sharder import ModelSharder
from shardcore.config import ShardConfig
from shardcore.policy import Heads, ModulePolicy, Policy, Stages
from shardcore.styles import attribute, head, local_groups, local_heads, norm, partial, region, replicate, vocab


@dataclass
class Config:
    hidden: int = 32
    heads: int = 8
    kv_heads: int = 2
    inner: int = 44
    layers: int = 2
    vocab: int = 97
    positions: int = 12
    dropout: float = 0.0
    qk_norm: bool = True
    fixed_views: bool = False
    tied: bool = False
    checkpoint: str | None = None  # "reentrant" or "non-reentrant"


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.head_dim = config.hidden // config.heads
        self.num_heads = config.heads
        self.num_kv_heads = config.kv_heads
        self.num_key_value_groups = config.heads // config.kv_heads
        self.fixed_views = config.fixed_views
        self.q_proj = nn.Linear(config.hidden, config.hidden)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * self.head_dim)
        self.o_proj = nn.Linear(config.hidden, config.hidden)
        self.q_norm = nn.LayerNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_dim) if config.qk_norm else nn.Identity()
        self.drop = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        q = self.q_norm(self._heads(self.q_proj(hidden), self.num_heads)).transpose(1, 2)
        k = self.k_norm(self._heads(self.k_proj(hidden), self.num_kv_heads)).transpose(1, 2)
        v = self._heads(self.v_proj(hidden), self.num_kv_heads).transpose(1, 2)
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        weights = self.drop(scores.softmax(-1))
        out = weights @ v  # (B, heads, S, head_dim)
        return self.o_proj(out.transpose(1, 2).reshape(hidden.size(0), hidden.size(1), -1))

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.size(0), -1, heads if self.fixed_views else x.size(-1) // self.head_dim, self.head_dim)


class Mlp(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.inner)
        self.up = nn.Linear(config.hidden, config.inner)
        self.down = nn.Linear(config.inner, config.hidden)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(F.silu(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.norm2 = nn.LayerNorm(config.hidden)
        self.mlp = Mlp(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(hidden=self.norm1(x)))
        return x + self.drop(self.mlp(self.norm2(x)))


class Decoder(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.checkpoint = config.checkpoint
        self.embed = nn.Embedding(config.vocab, config.hidden, padding_idx=1)
        self.positions = nn.Parameter(torch.empty(config.positions, config.hidden))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)

    def forward(self, ids: Tensor | None = None, inputs: Tensor | None = None) -> Tensor:
        x = self.embed(ids) if inputs is None else inputs
        x = x + self.positions[: x.size(1)]
        for layer in self.layers:
            if self.checkpoint and self.training:
                x = checkpoint(layer, x, use_reentrant=self.checkpoint == "reentrant")
            else:
                x = layer(x)
        return self.norm(x)


class TinyLM(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        self.head = nn.Linear(config.hidden, config.vocab, bias=not config.tied)
        if config.tied:
            self.head.weight = self.model.embed.weight

    def forward(self, ids: Tensor | None = None, inputs: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        logits = self.head(self.model(ids, inputs))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TinyPolicy(Policy):
    checks = (Heads("heads", kv="kv_heads"),)
    stages = Stages(first=("embed", "positions"), blocks="layers", last="norm").under("model", then="head")

    def module_policy(self) -> ModulePolicy:
        return {
            "TinyLM": [head("head")],
            "Decoder": [vocab("embed"), replicate("positions"), norm("norm")],
            "Block": [
                norm("norm1", "norm2"),
                region(
                    enter="attention",
                    col="attention.q_proj",
                    kv=("attention.k_proj", "attention.v_proj"),
                    row="attention.o_proj",
                    unit="head",
                ),
                region(enter="mlp", col=("mlp.gate", "mlp.up"), row="mlp.down"),
                partial("attention.q_norm", "attention.k_norm"),
                attribute("attention.num_key_value_groups", local_groups),
            ],
        }


class FixedViewsPolicy(TinyPolicy):
    """For ``fixed_views``: heads are counted by attributes, which therefore have to be local ones."""

    def module_policy(self) -> ModulePolicy:
        rows = super().module_policy()
        extra = [attribute("attention.num_heads", local_heads), attribute("attention.num_kv_heads", _local_kv)]
        return {**rows, "Block": [*rows["Block"], *extra]}


def _local_kv(heads: Any) -> int:
    return heads.local_kv


def randomize(module: nn.Module, seed: int = 0) -> None:
    """Give every parameter, norms and biases included, values that none of them has by accident."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(noise / max(parameter.size(-1), 1) ** 0.5 if parameter.ndim > 1 else 0.5 + 0.3 * noise)


def build(seed: int = 0, dtype: torch.dtype = torch.float64, **options: Any) -> TinyLM:
    """Return an unsharded model, the same on every rank."""
    model = TinyLM(Config(**options)).to(dtype)
    randomize(model, seed)
    return model


def shard(model: nn.Module, policy: type[Policy] = TinyPolicy, **fields: Any) -> nn.Module:
    """Shard over all ranks."""
    return ModelSharder(model, policy, ShardConfig.of(**fields)).shard()


def twins(policy: type[Policy] = TinyPolicy, *, fields: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return an unsharded model and its sharded copy."""
    reference = build(**options)
    return reference, shard(copy.deepcopy(reference), policy, **(fields or {}))


def batch(seed: int = 0, rows: int = 3, length: int = 8, vocab: int = 97) -> Tensor:
    """Return token ids (rows, length), the same on every rank."""
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed + 1000))


def direction(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return a random direction for every parameter, laid out as the parameter is."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, parameter in model.named_parameters():
        whole = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        found[name] = whole
    return found
