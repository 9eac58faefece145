"""Norms by torch's fused functions."""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from shardcore.nn.base import LocalModule
from shardcore.nn.mixin import add_mixin

__all__ = ["FusedRMSNorm"]


class FusedRMSNorm(LocalModule):
    """A root-mean-square norm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467) in one kernel.

    Computes what ``weight * x / sqrt(mean(x**2) + eps)`` does, with `torch.nn.functional.rms_norm`: in float32 where
    the input is of half precision, else in the input's own dtype. (Norms of libraries that compute in float32 always
    agree with it to float32 rounding, not beyond.)
    """

    keeps_name: ClassVar[bool] = True

    weight: nn.Parameter
    _shard_eps: str

    @classmethod
    def fuse(cls, module: nn.Module, eps: str) -> None:
        """Make ``module`` such a norm, in place; ``eps`` is its attribute with the constant below the root."""
        add_mixin(module, cls)
        module.__dict__["_shard_eps"] = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return (..., H) normalized over its last dim."""
        weight, eps = self.weight, getattr(self, self._shard_eps)
        if weight.dtype == hidden_states.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, eps)
        # A weight of another dtype decides the dtype of the product, as in the norm written out.
        return weight * F.rms_norm(hidden_states, weight.shape, None, eps)
