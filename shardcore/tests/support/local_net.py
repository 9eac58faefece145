"""The kit's decoder with parameters of heads, parameters that all heads read, and parameters that others read."""

from __future__ import annotations

import dataclasses
from typing import Any

import kit_net
import torch
import torch.nn.functional as F
from kit_net import Config, NetPolicy
from torch import Tensor, nn

from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import by_heads, partial, replicate

REACH = 4


class Attention(kit_net.Attention):
    """Adds biases by distance, scales heads, and favours some keys."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.biases = nn.Embedding(REACH, c.heads)
        self.scale = nn.Parameter(torch.empty(c.heads, 1, 1))
        self.favour = nn.Parameter(torch.empty(self.head_dim))

    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        q = self.q_norm(self._heads(self.q(x), self.num_heads)).transpose(1, 2)
        k = self.k_norm(self._heads(self.k(x), self.num_kv_heads)).transpose(1, 2)
        v = self._heads(self.v(x), self.num_kv_heads).transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        keys = k.repeat_interleave(self.groups, 1)
        scores = q @ keys.transpose(-1, -2) * self.scale + (keys * self.favour).sum(-1).unsqueeze(-2)
        lengths = scores.shape[-2:]
        places = torch.arange(lengths[1])
        far = (places[lengths[1] - lengths[0] :, None] - places).clamp(0, REACH - 1)
        mask = torch.ones(lengths, dtype=torch.bool).tril(lengths[1] - lengths[0])
        scores = scores + self.biases(far).permute(2, 0, 1)
        weights = self.drop(scores.masked_fill(~mask, -1e9).softmax(-1))
        out = (weights @ v.repeat_interleave(self.groups, 1)).transpose(1, 2)
        return self.o(out.reshape(x.size(0), x.size(1), -1)), weights, [k, v]


class Block(kit_net.Block):
    """Computes one of its norms itself."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.attention = Attention(c)

    def forward(self, x: Tensor, memory: Tensor, past: list[Tensor] | None = None) -> Any:
        a, weights, present = self.attention(self.norm1(x), past)
        x = x + self.drop(a)
        x = x + self.drop(self.cross(self.norm2(x), memory=memory))
        normed = F.layer_norm(x, x.shape[-1:], self.norm3.weight, self.norm3.bias)
        return x + self.drop(self.mlp(normed)), weights, present


class Net(kit_net.Net):
    """Reads the table of another module, which it calls too."""

    def __init__(self, c: Config) -> None:
        super().__init__(c)
        self.table = nn.Embedding(3, c.hidden)
        self.decoder.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.encode = nn.Sequential(nn.Linear(c.hidden, c.hidden), Mixed(self))


class Mixed(nn.Module):
    """Adds rows of a table that it does not hold."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = (net,)

    def forward(self, x: Tensor) -> Tensor:
        (net,) = self.net
        return x + net.table.weight.mean(0) * net.table.weight[1] + net.table(torch.ones((), dtype=torch.long))


class LocalPolicy(NetPolicy):
    stages = Stages(first=("embed", "encode", "table"), blocks="decoder.layers", last=("decoder.norm", "head"))

    def module_policy(self) -> ModulePolicy:
        rules = dict(super().module_policy())
        heads = by_heads("biases", dim=1, heads="biases.embedding_dim")
        return {
            **rules,
            "Net": [*rules["Net"], replicate("table")],  # type: ignore[misc]  # a list
            "Attention": [heads, by_heads("scale"), partial("favour")],
        }


def build(**options: Any) -> Net:
    model = Net(Config(**options)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


CASE = dataclasses.replace(
    kit_net.CASE,
    name="local",
    build=build,
    collectives=(3, 6),  # backward: as the kit's own, and what all heads read
    sharded=("biases", "scale", "attention.q.weight"),
    parts=(),
    policy=LocalPolicy,
)
