"""A tensor that several regions use besides their own input, such as the encoder's states: it enters once for all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardcore.comm.collectives import copy_to_tp
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext

__all__ = ["EnteredArgument"]


class EnteredArgument:
    """A forward pre-hook that enters one argument for all regions below its module.

    Identity in the forward, one all-reduce of the argument's gradient in the backward.

    Args:
        context: of the sharded model.
        argument: name of the argument of the module's ``forward``, and its position.
    """

    def __init__(self, context: ShardContext, argument: tuple[str, int]) -> None:
        self.context = context
        self._name, self._position = argument

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with this one entered, if it is there and needs a gradient."""
        if not torch.is_grad_enabled():
            return args, kwargs
        if self._name in kwargs:
            return args, {**kwargs, self._name: self._enter(kwargs[self._name])}
        if (place := self._position) < len(args):
            return (*args[:place], self._enter(args[place]), *args[place + 1 :]), kwargs
        return args, kwargs

    def _enter(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return copy_to_tp(value, self.context.channel) if value.requires_grad else value
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value)):
            raise NotSupportedError(
                f"the argument {self._name!r} that enters the regions is a {type(value).__name__} with a tensor that "
                "needs a gradient; wanted one tensor"
            )
        return value
