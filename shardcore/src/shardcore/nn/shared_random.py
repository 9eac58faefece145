"""Modules that draw the same random numbers on all ranks, inside regions too."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from shardcore.mesh import ShardContext
from shardcore.nn.base import SwappedModule

__all__ = ["SharedRandom"]


class SharedRandom(SwappedModule):
    """A module that draws from the stream that all ranks share, even where it is forked.

    For draws that decide about whole samples (stochastic depth): ranks that decide differently would add parts of
    different networks.
    """

    keeps_name: ClassVar[bool] = True

    _shard_context: ShardContext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on the shared stream."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with self._shard_context.random.shared():
            return super().forward(*args, **kwargs)
