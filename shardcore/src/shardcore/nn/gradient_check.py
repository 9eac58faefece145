"""Models that look once, for each way of calling them, at whose every gradient will be, before any backward."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardcore._torch import backward_task
from shardcore.errors import PlanError, Problem
from shardcore.mesh import ShardContext
from shardcore.nn.base import ParallelMixin
from shardcore.nn.mixin import add_mixin
from shardcore.nn.region.flow import Graph
from shardcore.nn.region.gradients import problems, wrong_gradients

__all__ = ["GradientChecked", "check_gradients"]


class GradientChecked(ParallelMixin):
    """A model whose first call of each kind is looked at: wrong gradients are an error before a backward makes them.

    Calls are of one kind if they have the same arguments, as far as these decide what runs: which ones there are, which
    of them need a gradient, what is switched on, the training mode, and, where a policy is new, which parameters are
    trained. A later call of a kind costs a look into a set.

    Each rank judges by itself: what is wrong follows from the policy and the call, which are the same on all. They do
    not meet for it, since which kinds a rank has seen is its own: an argument that changes nothing may differ.
    """

    keeps_name: ClassVar[bool] = True

    _checked_kinds: set[Hashable]
    _shard_context: ShardContext
    #: Of all modules, where it matters which are trained; which modules there are another check looks at.
    _checked_parameters: list[dict[str, nn.Parameter | None]]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward.

        Raises:
            PlanError: the gradients of this kind of call would be wrong, though its outputs are right.
        """
        out = super().forward(*args, **kwargs)
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return out
        kind = self._kind(args, kwargs)
        if kind not in self._checked_kinds and backward_task() == -1:
            self._check_gradients(out, args, kwargs)
            self._checked_kinds.add(kind)
        return out

    def _kind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Hashable:
        ranks = self._shard_context.channel.size
        found: list[Any] = [self.training]
        for held in self._checked_parameters:
            for parameter in held.values():
                found.append(parameter is not None and parameter.requires_grad)
        for value in args:
            found.append(_kind_of(value, ranks))
        for name in sorted(kwargs):
            found += (name, _kind_of(kwargs[name], ranks))
        return tuple(found)

    def _check_gradients(self, out: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        outputs = list(_differentiated(out))
        if not outputs:
            return
        if found := self._problems(outputs, args, kwargs):
            kind = type(self).__name__
            raise PlanError(f"the gradients of this {kind} would be wrong, though what it returns is right", found)

    def _problems(self, outputs: list[Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Problem]:
        given = {f"at position {i}": value for i, value in enumerate(args)} | {repr(n): v for n, v in kwargs.items()}
        tensors = [(name, t) for name, value in given.items() for t in tree_leaves(value) if isinstance(t, Tensor)]
        graph = Graph(outputs, [t for _, t in tensors])
        arguments = {id(t): name for name, t in tensors}
        judged = arguments | {id(p): "" for p in self.parameters() if not isinstance(p, DTensor)}
        wrong = wrong_gradients(graph, judged)
        return problems(self, graph, wrong, arguments) if wrong else []


def check_gradients(model: nn.Module, *, whatever_is_trained: bool) -> None:
    """Let a sharded model check the gradients of each kind of call, also by which parameters are trained if asked."""
    context = model.__dict__["_shard_context"]
    add_mixin(model, GradientChecked)
    held = [module._parameters for module in model.modules() if module._parameters] if whatever_is_trained else []
    model.__dict__.update(_shard_context=context, _checked_kinds=set(), _checked_parameters=held)


def _kind_of(value: Any, ranks: int) -> Any:
    if isinstance(value, Tensor):
        # Too few tokens are not split.
        return value.requires_grad, value.ndim, value.ndim > 1 and value.size(1) >= ranks
    if isinstance(value, tuple | list | dict):
        return type(value), any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(value))
    return value if value is None or isinstance(value, bool) else type(value)


def _differentiated(out: Any) -> Iterator[Tensor]:
    """Yield the outputs that a backward is expected to start from: the loss if there is one, or else all tensors.

    Tensors inside of further containers are left out: captured states and caches may hold this rank's part.
    """
    items: Sequence[Any] = [out]
    if isinstance(out, Mapping):
        items = [out["loss"]] if isinstance(out.get("loss"), Tensor) else list(out.values())
    elif isinstance(out, tuple | list):
        items = out
    if len(items) > 1 and isinstance(items[0], Tensor) and items[0].ndim == 0:
        items = items[:1]
    for item in items:
        if isinstance(item, Tensor) and item.requires_grad and not isinstance(item, DTensor):
            yield item
