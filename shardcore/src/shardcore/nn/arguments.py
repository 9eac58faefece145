"""Arguments of a module's forward that are changed on their way in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

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

    def hook(self, change: Callable[[Any, str], Any]) -> Callable[..., Any]:
        """Return a forward pre-hook that changes this one, if it is there; ``change`` is told what to call it too."""

        def changing(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            where = f"{type(module).__name__}: the argument {self.name!r}"
            return self.changed(args, kwargs, lambda value: change(value, where))

        return changing


def entered(context: ShardContext, value: Any, where: str) -> Any:
    """Let a tensor enter that several regions use besides their own input, such as the encoder's states.

    It enters once for all: identity in the forward, one all-reduce of its gradient in the backward, if it needs one.
    """
    if not torch.is_grad_enabled():
        return value
    if isinstance(value, Tensor):
        return copy_to_tp(value, context.channel) if value.requires_grad else value
    if any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value)):
        raise NotSupportedError(
            f"{where} that enters the regions is a {type(value).__name__} with a tensor that needs a gradient; wanted "
            "one tensor"
        )
    return value


def sliced(context: ShardContext, dim: int, heads: int, partial: bool, value: Any, where: str) -> Any:
    """Return this rank's heads of what has all of them, such as the slopes of ALiBi or a bias of positions.

    The dim has all ``heads``, or several times as many with the heads innermost (batch * heads), or one for all of
    them, which stays; so do None and other plain values. Forward: a view, or a copy where heads of several samples lie
    apart. Backward, if the tensor needs a gradient: an all-gather of it, or an all-reduce where one entry stands for
    all heads. With ``partial`` nothing is sent: what makes the tensor sums its own gradient, and that of other ranks'
    heads is zero here.
    """
    if not isinstance(value, Tensor):
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise NotSupportedError(f"{where} is a {type(value).__name__}; wanted one tensor, whose heads are cut")
    at = dim + value.ndim if dim < 0 else dim
    size = value.size(at) if 0 <= at < value.ndim else 0
    if size != 1 and (size == 0 or size % heads):
        raise NotSupportedError(
            f"{where} has the shape {tuple(value.shape)}; wanted {heads} heads, several times {heads} (batch * heads) "
            f"or 1 on dim {dim}. Correct dim= or heads= of slice_arg in the policy, or leave it out if the tensor "
            "holds this rank's heads already"
        )
    summing = torch.is_grad_enabled() and value.requires_grad and not partial
    if size == 1:
        return copy_to_tp(value, context.channel) if summing else value
    by_heads = value.unflatten(at, (-1, heads))
    if summing:
        return split_to_tp(by_heads, context.channel, at + 1).flatten(at, at + 1)
    count = heads // context.size
    return by_heads.narrow(at + 1, context.rank * count, count).flatten(at, at + 1)
