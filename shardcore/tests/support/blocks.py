"""Parts that small nets are made of; policies name them by their classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    """Two linears with a function between them: what a region is made of."""

    def __init__(
        self, width: int, inner: int, function: Callable[[Tensor], Tensor] = torch.tanh, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=bias), nn.Linear(inner, width)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x)))


class Block(nn.Module):
    """What goes through a norm and ``mlp`` is added to what came."""

    def __init__(self, width: int, mlp: nn.Module) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Net(nn.Module):
    """Blocks, one after the other, and a norm at the end."""

    def __init__(self, width: int, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(blocks), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
