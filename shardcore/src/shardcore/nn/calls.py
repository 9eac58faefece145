"""Methods besides ``forward`` that run a module; all that surrounds a forward surrounds them too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar, Self

from torch import nn
from typing_extensions import override

from shardcore.mesh.context import ShardContext
from shardcore.nn.base import with_methods
from shardcore.nn.mixin import once
from shardcore.nn.replicated import Replicated
from shardcore.nn.root import RngScope

#: On a module: the unit of FSDP2 that holds its parameters, and gathers them for a call. Set by `shardcore.fsdp`.
UNIT = "_shardcore_unit"


class MethodsAsCalls(RngScope):
    """A module with ``methods`` that run it: as in its forward, with its random stream, local parameters and FSDP2."""

    keeps_name: ClassVar[bool] = True
    option_names: ClassVar[frozenset[str]] = frozenset({"methods"})

    @classmethod
    @override
    def swap_class(
        cls, module: nn.Module, context: ShardContext, *, methods: tuple[str, ...] = (), **options: Any
    ) -> Self:
        new = super().swap_class(module, context)
        with_methods(new, {name: _as_call(getattr(type(new), name)) for name in methods})
        return new


@once
def _as_call(native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.on_stream(functools.partial(_gathered, native, self), args, kwargs)

    return method


def _gathered(native: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    run: Callable[..., Any] = functools.partial(native, module)
    if isinstance(module, Replicated):
        run = functools.partial(module.run_method, native)
    unit = module.__dict__.get(UNIT)
    return run(*args, **kwargs) if unit is None else unit.run(run, args, kwargs)
