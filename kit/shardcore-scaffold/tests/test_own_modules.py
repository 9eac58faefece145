"""Drafts for models that have no configuration."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")  # which the command that drafts packs needs

from shardcore_scaffold.drafts import unseen
from shardcore_scaffold.facts import Facts
from shardcore_scaffold.guess import guess


class _Attention(nn.Module):
    """Counts its heads by a name that says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.h, self.d = 4, 3
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (m(x).view(*x.shape[:2], self.h, self.d).transpose(1, 2) for m in (self.q, self.k, self.v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.o(y.transpose(1, 2).flatten(2))


def test_a_model_without_a_configuration_is_split_whole() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(40, 12), nn.Embedding(12, 12)
            self.blocks = nn.ModuleList([_Attention(), _Attention()])
            self.scores = nn.Linear(12, 40)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids) + self.places(torch.arange(ids.shape[1]))
            return self.scores(self.blocks[1](self.blocks[0](x)))

    torch.manual_seed(0)
    ids = torch.arange(10).view(2, 5)
    found = guess(Facts(Model().double(), lambda model: model(ids)))
    assert 'attribute("h", per_rank),' in found.rows["_Attention"]  # counted by any name that is read
    assert any('heads="h"' in row for row in found.rows["_Attention"])
    rows = [row for row in found.rows["Model"] if "sequence" not in row]
    assert sorted(rows) == ['head("scores"),', 'replicate("places"),', 'vocab("words"),']


def test_modules_that_only_the_whole_model_has_are_named() -> None:
    blocks = [nn.ModuleDict({"up": nn.Linear(2, 2)}) for _ in range(3)]
    blocks[1]["gate"] = nn.Sequential(nn.Linear(2, 2))
    blocks[2]["gate"] = nn.Sequential(nn.Linear(2, 2))
    whole = nn.ModuleDict({"blocks": nn.ModuleList(blocks), "head": nn.Linear(2, 2)})
    small = nn.ModuleDict({"blocks": nn.ModuleList(blocks[:1])})
    assert unseen(whole, small) == ["blocks.{i}.gate (Sequential)", "head (Linear)"]


class _Mixer(nn.Module):
    """Has as many heads as a configuration counts keys, and they are no keys."""

    def __init__(self) -> None:
        super().__init__()
        self.n_mixer_heads = 2
        self.gates, self.o = nn.Linear(12, 24), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states, gate = self.gates(x).view(*x.shape[:2], self.n_mixer_heads, 12).chunk(2, dim=-1)
        return x + self.o((states.cumsum(1) * states.norm(dim=-1, keepdim=True) * gate).flatten(2))


def test_heads_that_are_no_keys_are_counted_by_their_own_module() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
            self.blocks = nn.ModuleList([_Mixer(), _Mixer()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](self.blocks[0](x))

    draft = guess(Facts(Model().double(), lambda model: model(torch.randn(2, 5, 12, dtype=torch.float64))))
    assert 'region(col=segments("gates", 2, by="head"), row="o", heads="n_mixer_heads"),' in draft.rows["_Mixer"]
    assert not draft.checks
