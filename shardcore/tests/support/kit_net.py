"""A small decoder with everything that the conformance kit looks at, in plain torch, and its right policy.

Grouped queries with norms on queries and keys, cross-attention to a memory that is computed once, biases, dropouts on
split and on replicated activations, captured outputs, checkpointing, generation with a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardcore.mesh.context import context_of
from shardcore.policy import Heads, ModulePolicy, Policy, Stages
from shardcore.styles import (
    attribute,
    enter_arg,
    head,
    local_groups,
    norm,
    outputs,
    partial,
    region,
    replicate,
    sequence,
    vocab,
)
from shardcore_testing import Case, Supports


@dataclass
class Config:
    hidden: int = 32
    heads: int = 4
    kv_heads: int = 4
    inner: int = 44
    layers: int = 2
    vocab: int = 37
    dropout: float = 0.0
    fixed_views: bool = False
    residual_inside: bool = False
    tied: bool = True
    constant_biases: bool = False
    fused: bool = False
    positions: bool = False


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.hidden // c.heads
        self.num_heads, self.num_kv_heads, self.groups = c.heads, c.kv_heads, c.heads // c.kv_heads
        self.fixed_views, self.residual_inside = c.fixed_views, c.residual_inside
        self.q = nn.Linear(c.hidden, c.hidden)
        self.k = nn.Linear(c.hidden, c.kv_heads * self.head_dim)
        self.v = nn.Linear(c.hidden, c.kv_heads * self.head_dim)
        self.o = nn.Linear(c.hidden, c.hidden)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, past: list[Tensor] | None = None) -> tuple[Tensor, Tensor, list[Tensor]]:
        q = self.q_norm(self._heads(self.q(x), self.num_heads)).transpose(1, 2)
        k = self.k_norm(self._heads(self.k(x), self.num_kv_heads)).transpose(1, 2)
        v = self._heads(self.v(x), self.num_kv_heads).transpose(1, 2)
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.repeat_interleave(self.groups, 1).transpose(-1, -2) / self.head_dim**0.5
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(scores.shape[-1] - scores.shape[-2])
        weights = self.drop(scores.masked_fill(~mask, -1e9).softmax(-1))
        out = (weights @ v.repeat_interleave(self.groups, 1)).transpose(1, 2)
        out = self.o(out.reshape(x.size(0), x.size(1), -1))
        return (x + out if self.residual_inside else out), weights, [k, v]

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        return x.view(x.size(0), -1, heads if self.fixed_views else x.size(-1) // self.head_dim, self.head_dim)


class Mlp(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.fused = c.fused
        if c.fused:
            self.both = nn.Linear(c.hidden, 2 * c.inner)
        else:
            self.gate, self.up = nn.Linear(c.hidden, c.inner), nn.Linear(c.hidden, c.inner)
        self.down = nn.Linear(c.inner, c.hidden)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1) if self.fused else (self.gate(x), self.up(x))
        return self.down(self.drop(F.silu(gate) * up))


class Cross(nn.Module):
    """Gates a stream by a memory that all blocks share."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(c.hidden, c.inner), nn.Linear(c.hidden, c.inner)
        self.out = nn.Linear(c.inner, c.hidden)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        return self.out(self.q(x).tanh() * self.k(memory))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(c.hidden) for _ in range(3))
        self.attention, self.cross, self.mlp = Attention(c), Cross(c), Mlp(c)
        self.drop = nn.Dropout(c.dropout)

    def forward(self, x: Tensor, memory: Tensor, past: list[Tensor] | None = None) -> Any:
        a, weights, present = self.attention(self.norm1(x), past)
        x = self.drop(a) if self.attention.residual_inside else x + self.drop(a)
        x = x + self.drop(self.cross(self.norm2(x), memory=memory))
        return x + self.drop(self.mlp(self.norm3(x))), weights, present


class Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm = nn.LayerNorm(c.hidden)
        self.checkpointing: dict[str, Any] | None = None

    def forward(self, x: Tensor, memory: Tensor, past: Any = None) -> Any:
        states, weights, presents = [], [], []
        for index, layer in enumerate(self.layers):
            before = past[index] if past else None
            if self.checkpointing and self.training:
                x, w, present = checkpoint(layer, x, memory, before, **self.checkpointing)
            else:
                x, w, present = layer(x, memory, before)
            states.append(x)
            weights.append(w)
            presents.append(present)
        return self.norm(x), states, weights, presents


class Positions(nn.Module):
    """Adds two parameters to each other first: both get the same gradient."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.empty(c.hidden)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.left + self.right)


class Net(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed = nn.Embedding(c.vocab, c.hidden)
        self.encode = nn.Linear(c.hidden, c.hidden)
        self.positions = Positions(c) if c.positions else None
        self.decoder = Decoder(c)
        self.head = nn.Linear(c.hidden, c.vocab, bias=False)
        if c.tied:
            self.head.weight = self.embed.weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        output_attentions: bool = False,
        output_hidden_states: bool = False,
        past: Any = None,
        memory: Tensor | None = None,
    ) -> dict[str, Any]:
        x = self.embed(input_ids)
        x = x if self.positions is None else self.positions(x)
        memory = self.encode(x).mean(1, keepdim=True) if memory is None else memory
        x, states, weights, presents = self.decoder(x, memory, past=past)
        out: dict[str, Any] = {"logits": self.head(x)}
        if labels is not None:
            out["loss"] = F.cross_entropy(out["logits"].flatten(0, 1), labels.flatten())
        if output_attentions:
            out["attentions"] = tuple(weights)
        if output_hidden_states:
            out["hidden_states"] = tuple(states)
        if past is not None:
            out["past"] = Cache(presents, memory)
        return out

    def gradient_checkpointing_enable(self, kind: dict[str, Any]) -> None:
        self.decoder.checkpointing = kind

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        use_cache: bool = True,
        do_sample: bool = False,
        return_dict_in_generate: bool = False,
        top_k: int = 0,
        temperature: float = 1.0,
    ) -> Any:
        cache, ids = Cache([]), input_ids
        for _ in range(max_new_tokens):
            if use_cache and cache.presents:
                out = self(ids[:, -1:], past=cache.presents, memory=cache.memory)
            else:
                memory = None if cache.memory is None else cache.memory
                out = self(ids, past=[], memory=memory)
            cache = out["past"]
            probabilities = (out["logits"][:, -1] / temperature).softmax(-1)
            new = torch.multinomial(probabilities, 1) if do_sample else probabilities.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], 1)
        return SimpleNamespace(sequences=ids, past_key_values=cache) if return_dict_in_generate else ids


@dataclass
class Cache:
    presents: list[list[Tensor]]
    memory: Tensor | None = None
    layers: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [SimpleNamespace(keys=keys, values=values) for keys, values in self.presents]


class NetPolicy(Policy):
    checks = (Heads("heads", kv="kv_heads"),)
    stages = Stages(first=("embed", "encode", "positions"), blocks="decoder.layers", last=("decoder.norm", "head"))

    def module_policy(self) -> ModulePolicy:
        return {
            "Net": [
                vocab("embed"),
                head("head"),
                replicate("encode"),
                replicate("positions", optional=True),
                *self.captured(),
            ],
            "Decoder": [norm("norm"), *self.memory(), sequence(scatter="layers[0]", gather="norm")],
            "Block": [
                norm("norm1", "norm2", "norm3"),
                *self.attention(),
                region(enter="cross.x", col=("cross.q", "cross.k"), row="cross.out"),
                *self.mlp(),
            ],
        }

    def captured(self) -> list[Any]:
        return [outputs(attentions="heads", hidden_states="sequence")]

    def memory(self) -> list[Any]:
        return [enter_arg("", "memory")]

    def attention(self) -> list[Any]:
        return [
            region(
                enter="attention",
                col="attention.q",
                kv=("attention.k", "attention.v"),
                row="attention.o",
                unit="head",
            ),
            partial("attention.q_norm", "attention.k_norm"),
            attribute("attention.groups", local_groups),
        ]

    def mlp(self) -> list[Any]:
        return [region(enter="mlp", col=("mlp.gate", "mlp.up"), row="mlp.down")]

    def new_model_class(self) -> type[nn.Module] | None:
        return sharded_class(type(self.model))


def sharded_class(native: type[nn.Module]) -> type[nn.Module]:
    """Return the class whose ``generate`` runs on the model's own random stream."""
    if native not in _CLASSES:
        members = {"generate": on_stream(native.generate), "__module__": native.__module__}
        _CLASSES[native] = type(native.__name__, (native,), members)
    return _CLASSES[native]


def on_stream(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        if context_of(self) is None:
            return native(self, *args, **kwargs)
        context_of(self).random.enter(lambda: True)
        try:
            return native(self, *args, **kwargs)
        finally:
            context_of(self).random.leave()

    return generate


_CLASSES: dict[type, type] = {}


def build(**options: Any) -> Net:
    config = Config(**options)
    model = Net(config).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if config.constant_biases and name.endswith("bias"):
                parameter.zero_()
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, model.config.vocab, (3, 7), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


CASE = Case(
    name="net",
    build=build,
    inputs=inputs,
    outputs=("logits",),
    options={"tied": (True, False), "kv_heads": (4, 2)},
    collectives=(3, 5),  # backward: three regions, and the norms on queries and keys
    parts=("encode", "decoder.layers.1.mlp"),
    sharded=("attention.q.weight", "mlp.down.weight", "embed"),
    refuses=({"heads": 8, "kv_heads": 3, "hidden": 32},),
    supports=Supports(generation=True, captured=("attentions", "hidden_states"), sequence=True, save_pretrained=False),
    policy=NetPolicy,
)
