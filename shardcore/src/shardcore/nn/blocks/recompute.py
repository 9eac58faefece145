"""Blocks whose activations are recomputed in the backward."""

from __future__ import annotations

import functools
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardcore.nn.base import LocalModule
from shardcore.nn.mixin import add_mixin

__all__ = ["RecomputedBlock"]


class RecomputedBlock(LocalModule):
    """A block that keeps only its inputs, and runs its forward again in the backward (Chen et al. 2016).

    In training only, by `torch.utils.checkpoint` without reentrancy; hooks on the block run once.
    https://arxiv.org/abs/1604.06174
    """

    keeps_name: ClassVar[bool] = True

    @classmethod
    def recompute(cls, module: nn.Module) -> None:
        """Make ``module`` such a block, in place."""
        add_mixin(module, cls)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, keeping its inputs only."""
        if not self.training or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        # The block's own keywords are bound first: checkpoint would take those that are named like its options.
        return checkpoint(functools.partial(super().forward, **kwargs), *args, use_reentrant=False)
