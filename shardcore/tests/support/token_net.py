"""A small model whose embedding is split over the vocabulary, and its tokens along the sequence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import shardcore
from shardcore import Policy
from shardcore.styles import norm, region, replicate, sequence, vocab
from shardcore_testing.parity import assert_close, assert_same_gradients

WIDTH = 6


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(13, WIDTH), nn.Embedding(16, WIDTH)
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.places(torch.arange(ids.size(1)))
        return self.last(self.norm(x) if ids.size(1) % 2 else self.norm(input=x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())


class Stack(nn.Module):
    skips = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in () if self.skips else self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    #: What forward does to the input of the stack.
    between: Callable[[Tensor], Tensor] | None = None
    #: When it looks up the words again, for something else.
    again = ""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings, self.stack, self.head = Embeddings(), Stack(), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embeddings(ids)
        words = self.embeddings.words(ids).mean(1, keepdim=True) if self.again == "before" else 0
        x = self.stack(x if self.between is None else self.between(x))
        words = self.embeddings.words(ids).mean(1, keepdim=True) if self.again == "after" else words
        return self.head(x + words)


class ModelPolicy(Policy):
    def module_policy(self) -> Any:
        tokens = sequence(scatter="stack.blocks[0]", gather="stack.blocks[-1]", stack="stack")
        return {
            "Model": [replicate("head"), tokens],
            "Embeddings": [vocab("words"), replicate("places"), norm("norm")],
            "Block": [norm("norm"), region(col="up", row="down")],
        }


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def shard(native: nn.Module, tp: int = 2, **options: Any) -> nn.Module:
    """Shard a copy."""
    return shardcore.shard(
        copy.deepcopy(native), policy=ModelPolicy, tp=tp, enable_sequence_parallelism=True, **options
    )


def ids(length: int = 7) -> Tensor:
    return torch.arange(2 * length).view(2, length).mul(5) % 13


SUM, SCATTER, GATHER = "c10d::allreduce_", "c10d::alltoall_base_", "c10d::_allgather_base_"  # as gloo scatters


def compare(native: nn.Module, sharded: nn.Module, *lengths: int) -> None:
    """Compare outputs and gradients."""
    outs = [[model(ids(n)) for n in lengths or (7,)] for model in (sharded, native)]
    for got, wanted in zip(*outs, strict=True):
        assert_close(wanted, got, "outputs", 1e-10)
    for out in outs:
        sum(t.cos().sum() for t in out).backward()
    assert_same_gradients(native, sharded)
