"""What a model's own plan says otherwise than its draft."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")  # which the command that drafts packs needs

from shardcore_scaffold.facts import Facts
from shardcore_scaffold.guess import guess

COLUMNS = dict.fromkeys(("blocks.*.q", "blocks.*.k", "blocks.*.v"), "colwise")
WHOLE = {**COLUMNS, "blocks.*.o": "rowwise", "blocks.*.norm": "replicated_with_grad_allreduce"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 4, 3
        self.q, self.k, self.v, self.o = (nn.Linear(12, 12) for _ in range(4))
        self.norm, self.gate = nn.LayerNorm(3), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            m(x).view(*x.shape[:2], self.num_heads, self.head_dim).transpose(1, 2) for m in (self.q, self.k, self.v)
        )
        y = nn.functional.scaled_dot_product_attention(self.norm(q), k, v)
        return x * self.gate(x).softmax(-1) + self.o(y.transpose(1, 2).flatten(2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (None, []),
        ({}, []),
        (WHOLE, []),
        ({**WHOLE, "blocks.*.gate": "colwise"}, ["splits what is whole here: blocks.N.gate"]),
        ({**COLUMNS, "blocks.*.o": "rowwise"}, ["says nothing of blocks.N.norm, which each rank applies to its own"]),
        ({"blocks.*.o": "rowwise"}, []),
    ],
)
def test_what_differs_is_said(plan: dict[str, str] | None, said: list[str]) -> None:
    model = Model().double()
    if plan is not None:
        model.tp_plan = plan
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    found = [doubt for doubt in guess(Facts(model, lambda model: model(x))).doubts if "tp_plan" in doubt]
    assert len(found) == len(said)
    assert all(words in doubt for words, doubt in zip(said, found, strict=True))
