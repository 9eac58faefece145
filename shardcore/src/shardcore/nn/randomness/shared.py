"""Modules that draw the same random numbers on all ranks, inside regions too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from shardcore._torch import backward_task
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext
from shardcore.nn.base import ParallelMixin, with_methods
from shardcore.nn.mixin import once

__all__ = ["SharedNumpy", "SharedRandom"]


class SharedRandom(ParallelMixin):
    """A module that draws the same random numbers on all ranks, inside of regions too.

    For draws that decide about whole samples (stochastic depth): ranks that decide differently would add parts of
    different networks.
    """

    keeps_name: ClassVar[bool] = True

    _shard_context: ShardContext

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on the shared stream."""
        if torch.compiler.is_compiling():
            return super().forward(*args, **kwargs)
        with self._shard_context.random.shared():
            return super().forward(*args, **kwargs)


class SharedNumpy(ParallelMixin):
    """A module with methods that draw from numpy's global generator: the same numbers on all ranks.

    The generator is seeded from the model's random stream before each call, and set back to the user's state after it.

    Options:
        methods: the names of these methods.
    """

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"methods"})

    _shard_context: ShardContext

    @classmethod
    @override
    def problem(cls, module: nn.Module, ranks: int, *, methods: tuple[str, ...] = (), **options: Any) -> str | None:
        missing = [name for name in methods if not callable(getattr(type(module), name, None))]
        return f"{type(module).__name__} has no method {', '.join(missing)}" if missing else None

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, methods: tuple[str, ...] = (), **options: Any
    ) -> Self:
        new = super().swap_class(module, context)
        with_methods(new, {name: _seeded(getattr(type(new), name)) for name in methods})
        return new


@once
def _seeded(native: Callable[..., Any]) -> Callable[..., Any]:
    @torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
    def draw(self: Any, *args: Any, **kwargs: Any) -> Any:
        random = self._shard_context.random
        random.enter()
        try:
            with random.shared():
                return _drawing(native, self, *args, **kwargs)
        finally:
            random.leave()

    @functools.wraps(native)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and not self.training:
            return native(self, *args, **kwargs)
        return draw(self, *args, **kwargs)

    return method


def _drawing(native: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call ``native`` with numpy seeded from torch's generator, which moves on only if numpy's was used.

    Raises:
        NotSupportedError: numbers are drawn again in a backward, where the stream has moved on.
    """
    ahead = torch.Generator("cpu")  # whatever the default device is
    ahead.set_state(torch.default_generator.get_state())
    users = np.random.get_state()
    np.random.seed(int(torch.randint(1 << 32, (), generator=ahead, device="cpu").item()))
    fresh = _numpy_state()
    try:
        result = native(module, *args, **kwargs)
        used = _numpy_state() != fresh
    finally:
        np.random.set_state(users)
    if used and backward_task() != -1:  # no public way to ask whether a backward is running
        raise NotSupportedError(
            f"a checkpoint around the whole {type(module).__name__} recomputes it with other random numbers than "
            f"{native.__name__} drew before. Checkpoint its blocks instead (model.gradient_checkpointing_enable())."
        )
    if used:
        torch.randint(1 << 32, (), device="cpu")
    return result


def _numpy_state() -> tuple[Any, ...]:
    state: Any = np.random.get_state()
    _, keys, *rest = state
    return (keys.tobytes(), *rest)
