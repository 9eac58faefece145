"""What goes around one sharded model: data parallelism, and an optimizer of the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from torch import nn
from torch.optim import Optimizer

from shardcore.agree.fingerprint import Item, optimizer_items
from shardcore.errors import ConfigError, PlanError
from shardcore.mesh import ShardContext
from shardcore.plan import ShardPlan
from shardcore.policy import Stages
from shardcore.wrap.data_parallel import apply_data_parallel, unwrappable
from shardcore.wrap.optimizers import check_optimizer, repoint

__all__ = ["Wrapping"]


class Wrapping:
    """What is to be done to a model after it was sharded, and what has to hold for it before.

    Args:
        model: the model, unsharded yet.
        optimizer: an optimizer of its parameters, or None.
        wrap: whether FSDP2 is applied over the data axes.

    Raises:
        ConfigError: ``wrap`` is neither True nor False.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, *, wrap: bool) -> None:
        if not isinstance(wrap, bool):
            raise ConfigError(f"wrap= must be True or False, got {wrap!r}")
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._model, self._optimizer, self._wrap = model, optimizer, wrap

    def check(self, plan: ShardPlan) -> None:
        """Refuse what would fail after the model was changed."""
        if self._optimizer is not None:
            check_optimizer(self._optimizer, self._names)
        if self._wrap and (problems := unwrappable(self._model, plan)):
            raise PlanError(f"{type(self._model).__qualname__} cannot be wrapped by FSDP2", problems)

    def items(self) -> Iterator[Item]:
        """Yield what has to be the same on every rank."""
        yield "the argument wrap", str(self._wrap)
        yield "the argument optimizer", "given" if self._optimizer else "not given"
        if self._optimizer is not None:
            yield from optimizer_items(self._optimizer, self._names)

    def apply(
        self, context: ShardContext, stages: Stages | None, *, together: Callable[[Callable[[], None]], None]
    ) -> None:
        """Wrap the sharded model and re-point the optimizer.

        Args:
            context: that of the sharded model.
            stages: those of its plan.
            together: calls a function on every rank, and raises on all of them if it fails on one.
        """
        wraps = self._wrap and context.mesh.size() > context.size
        if wraps or self._optimizer is not None:
            together(functools.partial(self._change, context, stages))

    def _change(self, context: ShardContext, stages: Stages | None) -> None:
        if self._wrap:
            apply_data_parallel(self._model, context, stages)
        if self._optimizer is not None:
            repoint(self._optimizer, self._names, dict(self._model.named_parameters()))
