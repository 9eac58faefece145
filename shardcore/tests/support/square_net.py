"""Parts of a model that a square of ranks divides: a norm as transformers writes it, and a gated block."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Block", "OwnNorm"]


class OwnNorm(nn.Module):
    """As transformers writes it."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size, norm):
        super().__init__()
        self.norm, self.up, self.down = norm(size), nn.Linear(size, 3 * size), nn.Linear(3 * size, size)
        self.gate = nn.Linear(size, 3 * size, bias=False)

    def forward(self, x):
        normed = self.norm(x)
        return x + self.down(F.gelu(self.up(normed)) * self.gate(normed).sigmoid())
