"""Parts of models: one is sharded, and the modules around it are trained beside it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

import shardcore
from training import Sharded

__all__ = ["Part"]


class Part(Sharded):
    """A model of which one module is sharded."""

    def shard(self) -> None:
        """Shard the part, in its place."""
        part = self.model.get_submodule(self.draw.how["part"])
        assert shardcore.shard(part, **self.draw.mesh, **self.draw.fields) is part

    def clip(self, most: float) -> Tensor:
        """Clip by the norm of all, as torch does with tensors of one kind at a time."""
        shardcore.reduce_partial_gradients(self.model)
        norm = shardcore.grad_norm(self.model)
        trained = [p for p in self.model.parameters() if p.grad is not None]
        for kind in (True, False):
            torch.nn.utils.clip_grads_with_norm_([p for p in trained if isinstance(p, DTensor) == kind], most, norm)
        return norm
