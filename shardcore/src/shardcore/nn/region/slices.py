"""An argument that has all heads, such as the slopes of ALiBi or a bias of positions: each rank takes its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardcore.comm.collectives import copy_to_tp, split_to_tp
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext

__all__ = ["SlicedArgument"]


class SlicedArgument:
    """A forward pre-hook that cuts one argument to this rank's heads.

    The dim has all heads, or several times as many with the heads innermost (batch * heads), or one for all of them,
    which stays. Forward: a view, or a copy where heads of several samples lie apart. Backward, if the tensor needs a
    gradient: an all-gather of it, or an all-reduce where one entry stands for all heads.

    Args:
        context: of the sharded model.
        argument: name of the argument of the module's ``forward``, and its position.
        dim: the dim with heads.
        heads: how many there are on all ranks together.
        partial: what makes the tensor sums its own gradient: here, that of other ranks' heads is zero, and nothing is
            sent.
    """

    def __init__(
        self, context: ShardContext, argument: tuple[str, int], dim: int, heads: int, *, partial: bool
    ) -> None:
        self.context = context
        self._name, self._position = argument
        self._dim, self._heads, self._partial = dim, heads, partial

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with this one cut, if it is there.

        Raises:
            NotSupportedError: it is no tensor with so many heads on the dim.
        """
        if self._name in kwargs:
            return args, {**kwargs, self._name: self._cut(module, kwargs[self._name])}
        if (place := self._position) < len(args):
            return (*args[:place], self._cut(module, args[place]), *args[place + 1 :]), kwargs
        return args, kwargs

    def _cut(self, module: nn.Module, value: Any) -> Any:
        where = f"{type(module).__name__}: the argument {self._name!r}"
        if not isinstance(value, Tensor):
            if value is None or isinstance(value, bool | int | float | str):
                return value
            raise NotSupportedError(f"{where} is a {type(value).__name__}; wanted one tensor, whose heads are cut")
        dim = self._dim + value.ndim if self._dim < 0 else self._dim
        size = value.size(dim) if 0 <= dim < value.ndim else 0
        if size != 1 and (size == 0 or size % self._heads):
            raise NotSupportedError(
                f"{where} has the shape {tuple(value.shape)}; wanted {self._heads} heads, several times {self._heads} "
                f"(batch * heads) or 1 on dim {self._dim}. Correct dim= or heads= of slice_arg in the policy, or leave "
                "it out if the tensor holds this rank's heads already"
            )
        summing = torch.is_grad_enabled() and value.requires_grad and not self._partial
        if size == 1:
            return copy_to_tp(value, self.context.channel) if summing else value
        by_heads = value.unflatten(dim, (-1, self._heads))
        if summing:
            return split_to_tp(by_heads, self.context.channel, dim + 1).flatten(dim, dim + 1)
        count = self._heads // self.context.size
        return by_heads.narrow(dim + 1, self.context.rank * count, count).flatten(dim, dim + 1)
