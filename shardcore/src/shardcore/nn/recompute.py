"""Blocks whose activations are recomputed in the backward."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcore.nn.base import SwappedModule, swapped_class

__all__ = ["Recomputed"]


class Recomputed(SwappedModule):
    """A block that keeps only its inputs, and runs its forward again in the backward (Chen et al. 2016).

    In training only, by `torch.utils.checkpoint` without reentrancy; hooks on the block run once.
    https://arxiv.org/abs/1604.06174
    """

    keeps_name: ClassVar[bool] = True

    @classmethod
    def recompute(cls, module: nn.Module) -> None:
        """Make ``module`` such a block, in place."""
        module.__class__ = swapped_class(type(module), cls)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, keeping its inputs only."""
        if not self.training or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
