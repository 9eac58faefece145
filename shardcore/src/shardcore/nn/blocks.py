"""Blocks that are compiled or recomputed, and fused norms, on one rank as on many."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardcore.nn.base import COMPILED, LocalModule
from shardcore.nn.mixin import once


class FusedRMSNorm(LocalModule):
    """A root-mean-square norm (Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467) in one kernel.

    Computes what ``weight * x / sqrt(mean(x**2) + eps)`` does, with `torch.nn.functional.rms_norm`: in float32 where
    the input is of half precision, else in the input's own dtype. (Norms of libraries that compute in float32 always
    agree with it to float32 rounding, not beyond.)

    Options:
        eps: its attribute with the constant below the root.
    """

    keeps_name: ClassVar[bool] = True
    kept_options: ClassVar[Mapping[str, str]] = {"eps": "_shard_eps"}

    weight: nn.Parameter
    _shard_eps: str

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return (..., H) normalized over its last dim."""
        weight, eps = self.weight, getattr(self, self._shard_eps)
        if weight.dtype == hidden_states.dtype:
            return F.rms_norm(hidden_states, weight.shape, weight, eps)
        # A weight of another dtype decides the dtype of the product, as in the norm written out.
        return weight * F.rms_norm(hidden_states, weight.shape, None, eps)


# All layers of a library may share one forward, of which each class, kind of block and form of a call takes graphs:
# more than the 8 after which torch goes on without. Older releases of torch take no number.
_LIMIT: dict[str, Any] = (
    {"recompile_limit": 64} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
)


class CompiledBlock(LocalModule):
    """A block that `torch.compile` makes graphs of: bias and GELU, or bias, dropout and residual, are one kernel each.

    In training only: evaluation and generation, where lengths change from call to call, run as before. All blocks of a
    class share one compiled function. A region with a live dropout breaks the graph, nothing else of shardcore's does.
    """

    keeps_name: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, compiled while training."""
        native: Any = super().forward
        if not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return native(*args, **kwargs)
        function = native.__func__
        # What was compiled lives as long as one of the blocks that share it.
        known = self.__dict__.get(COMPILED)
        if known is None or known[0] is not function:
            known = self.__dict__[COMPILED] = function, _compiled(function)
        return known[1](self, *args, **kwargs)


@once
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # For each function once, not for each block: `torch.compile` counts recompilations by function.
    compiled: Callable[..., Any] = torch.compile(function, **_LIMIT)
    return compiled


class RecomputedBlock(LocalModule):
    """A block that keeps only its inputs, and runs its forward again in the backward (Chen et al. 2016).

    In training only, by `torch.utils.checkpoint` without reentrancy; hooks on the block run once.
    https://arxiv.org/abs/1604.06174
    """

    keeps_name: ClassVar[bool] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, keeping its inputs only."""
        if not self.training or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        # The block's own keywords are bound first: checkpoint would take those that are named like its options.
        return checkpoint(functools.partial(super().forward, **kwargs), *args, use_reentrant=False)
