"""Linears and embeddings that somebody wrote anew, a block of them, and its policy."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardcore.policy import ModulePolicy, Policy, Stages
from shardcore.styles import attribute, head, norm, per_rank, region, segments, vocab

HIDDEN, INNER, VOCAB = 16, 22, 37


class InOut(nn.Module):
    """A linear whose weight is (in, out), as that of transformers' Conv1D."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.addmm(self.bias, x.reshape(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], self.outputs)


class Rewritten(nn.Linear):
    """A linear that multiplies in its own words, as FalconLinear does."""

    def forward(self, x: Tensor) -> Tensor:
        out = x @ self.weight.T
        return out if self.bias is None else out + self.bias


class Scaled(nn.Embedding):
    """An embedding that is scaled, as Gemma's and BART's are."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.register_buffer("scale", torch.tensor(3.0), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale.to(self.weight.dtype)


class Attention(nn.Module):
    def __init__(self, linear: type[nn.Module]) -> None:
        super().__init__()
        self.split_size, self.heads = HIDDEN, 4
        self.qkv = linear(HIDDEN, 3 * HIDDEN)
        self.out = linear(HIDDEN, HIDDEN)
        self.drop = nn.Dropout(0.0)

    def forward(self, hidden: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(hidden).split(self.split_size, -1))
        return self.out((self.drop((q @ k.mT).softmax(-1)) @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, linear: type[nn.Module]) -> None:
        super().__init__()
        self.up = linear(HIDDEN, INNER)
        self.gate = linear(HIDDEN, INNER)
        self.down = linear(INNER, HIDDEN)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(hidden)) * self.gate(hidden))


class Block(nn.Module):
    def __init__(self, linear: type[nn.Module]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = Attention(linear)
        self.mlp = Mlp(linear)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden))
        return hidden + self.mlp(hidden)


class Model(nn.Module):
    def __init__(self, linear: type[nn.Module] = InOut, embedding: type[nn.Embedding] = Scaled) -> None:
        super().__init__()
        self.words = embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList([Block(linear) for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.double().parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.words(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class ModelPolicy(Policy):
    stages = Stages(first="words", blocks="blocks", last="head")

    def module_policy(self) -> ModulePolicy:
        return {
            "Model": [vocab("words"), head("head")],
            "Block": [
                norm("norm"),
                region(
                    enter="attention", col=segments("attention.qkv", 3), row="attention.out", heads="attention.heads"
                ),
                region(enter="mlp", col=("mlp.up", "mlp.gate"), row="mlp.down"),
                attribute("attention.split_size", per_rank),
            ],
        }


def ids(seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, (4, 5), generator=torch.Generator().manual_seed(seed))
