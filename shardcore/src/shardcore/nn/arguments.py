"""Arguments of a module's forward that are changed on their way in."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from shardcore.comm.collectives import copy_to_tp, split_to_tp
from shardcore.errors import NotSupportedError
from shardcore.mesh.context import ShardContext


class Argument(NamedTuple):
    """An argument of a module's ``forward``, which a call may give by name or by position."""

    name: str
    position: int

    def given(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return what a call gives for this one; None if it gives nothing."""
        return kwargs.get(self.name, args[self.position] if self.position < len(args) else None)

    def changed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with this one changed, if it is there."""
        if self.name in kwargs:
            return args, {**kwargs, self.name: change(kwargs[self.name])}
        if (place := self.position) < len(args):
            return (*args[:place], change(args[place]), *args[place + 1 :]), kwargs
        return args, kwargs


class _Changed:
    """A forward pre-hook that changes one argument.

    Args:
        context: of the sharded model.
        argument: name of the argument of the module's ``forward``, and its position.
    """

    def __init__(self, context: ShardContext, argument: tuple[str, int]) -> None:
        self.context = context
        self.argument = Argument(*argument)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with this one changed, if it is there."""
        return self.argument.changed(args, kwargs, lambda value: self.changed(value, type(module).__name__))

    @abstractmethod
    def changed(self, value: Any, where: str) -> Any:
        """Return what the module ``where`` gets in place of ``value``."""


class EnteredArgument(_Changed):
    """A tensor that several regions use besides their own input, such as the encoder's states: it enters once for all.

    Identity in the forward, one all-reduce of the argument's gradient in the backward, if it needs one.
    """

    @override
    def changed(self, value: Any, where: str) -> Any:
        if not torch.is_grad_enabled():
            return value
        if isinstance(value, Tensor):
            return copy_to_tp(value, self.context.channel) if value.requires_grad else value
        if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value)):
            raise NotSupportedError(
                f"{where}: the argument {self.argument.name!r} that enters the regions is a {type(value).__name__} "
                "with a tensor that needs a gradient; wanted one tensor"
            )
        return value


class SlicedArgument(_Changed):
    """An argument that has all heads, such as the slopes of ALiBi or a bias of positions: each rank takes its own.

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
        super().__init__(context, argument)
        self._dim, self._heads, self._partial = dim, heads, partial

    @override
    def changed(self, value: Any, where: str) -> Any:
        where = f"{where}: the argument {self.argument.name!r}"
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
