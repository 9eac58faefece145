"""Blocks whose training forward is compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from shardcore.nn.base import LocalModule
from shardcore.nn.mixin import add_mixin, once

__all__ = ["CompiledBlock"]

# On a block: its native forward and what was compiled of it, which lives as long as one of the blocks that share it.
_COMPILED = "_shard_compiled"

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

    @classmethod
    def compile_block(cls, module: nn.Module) -> None:
        """Make ``module`` such a block, in place."""
        add_mixin(module, cls)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward, compiled while training."""
        native: Any = super().forward
        if not self.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return native(*args, **kwargs)
        function = native.__func__
        known = self.__dict__.get(_COMPILED)
        if known is None or known[0] is not function:
            known = self.__dict__[_COMPILED] = function, _compiled(function)
        return known[1](self, *args, **kwargs)


@once
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    # For each function once, not for each block: `torch.compile` counts recompilations by function.
    compiled: Callable[..., Any] = torch.compile(function, **_LIMIT)
    return compiled
