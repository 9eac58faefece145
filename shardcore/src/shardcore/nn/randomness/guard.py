"""Modules whose calls run on the random stream of the sharded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self

import torch
from torch import nn
from typing_extensions import override

from shardcore._torch import backward_task
from shardcore.errors import NotSupportedError
from shardcore.mesh import ShardContext
from shardcore.nn.base import SwappedModule
from shardcore.nn.randomness.dropout import DropoutSites

__all__ = ["RngScope"]


class RngScope(SwappedModule):
    """A module whose outermost call runs on the model's random stream; the user's generators are always restored.

    The forward is wrapped, not hooked: hooks are not called after an interrupt, which would leave the stream in place.

    Options:
        draws: what was found in the code of classes; see `DropoutSites`.
    """

    keeps_name: ClassVar[bool] = True

    _stream_dropouts: DropoutSites
    _shard_context: ShardContext

    @classmethod
    @override
    def swap_class(cls, module: nn.Module, context: ShardContext, **options: Any) -> Self:
        new = super().swap_class(module, context)
        new.__dict__["_stream_dropouts"] = DropoutSites([module], draws=options.get("draws"))
        return new

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the native forward on the model's random stream.

        Raises:
            NotSupportedError: a checkpoint around the module recomputes it while one of its dropouts is live.
        """
        return self.on_stream(super().forward, args, kwargs)

    def on_stream(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``function``, which runs the module, on the model's random stream; see `forward`."""
        if torch.compiler.is_compiling() and not self._stream_dropouts.live():
            return function(*args, **kwargs)
        entered = _enter(self)
        try:
            return function(*args, **kwargs)
        finally:
            if entered:
                _leave(self)


# Generator states cannot be traced; these break the graph, outside the blocks and only where a dropout is live.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _enter(module: RngScope) -> bool:
    """Use the model's stream; returns False where a forward is recomputed inside a backward."""
    if backward_task() == -1:  # no public way to ask whether a backward is running
        module._shard_context.random.enter(module._stream_dropouts.live)
        return True
    if module._stream_dropouts.live():
        raise NotSupportedError(
            f"a checkpoint around the whole {type(module).__name__} recomputes it with other dropout masks: its "
            "random stream has moved on. Checkpoint its blocks instead (model.gradient_checkpointing_enable()), "
            "or set the dropout probabilities to 0."
        )
    return False


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _leave(module: RngScope) -> None:
    module._shard_context.random.leave()
