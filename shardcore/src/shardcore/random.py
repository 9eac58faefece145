"""The random numbers of a sharded model: seeding, saving and restoring its stream."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.errors import ConfigError, NotSupportedError
from shardcore.mesh import ShardContext, context_of
from shardcore.nn.dropout import DropoutSites

__all__ = ["StreamGuard", "get_rng_state", "manual_seed", "set_rng_state"]


def manual_seed(model: nn.Module, seed: int) -> None:
    """Restart the random stream of a sharded model (dropout masks, sampling in ``generate``) from ``seed``.

    ``torch.manual_seed`` does not reach it: a sharded model draws from a stream of its own, so that masks agree on the
    ranks however each is seeded. Call it on every rank with the same seed; data-parallel replicas get different
    numbers from one seed.

    Args:
        model: a sharded model.
        seed: any non-negative integer.

    Raises:
        ConfigError: the model was not sharded.
    """
    _context(model, "manual_seed").reseed(seed)


def get_rng_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the random state of a sharded model: ``uint8`` tensors on the CPU, by device name.

    Equal on all ranks of a tensor-parallel group; save it once for each data-parallel replica.

    Raises:
        ConfigError: the model was not sharded.
    """
    return _context(model, "get_rng_state").random.state()


def set_rng_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Continue the random stream of a sharded model from ``state``, as `get_rng_state` returned it.

    Raises:
        ConfigError: the model was not sharded, or the state is for other devices.
    """
    context = _context(model, "set_rng_state")
    try:
        context.random.load(state)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _context(model: nn.Module, caller: str) -> ShardContext:
    if (context := context_of(model)) is None:
        raise ConfigError(f"{caller} got a {type(model).__name__} that was not sharded; call shardcore.shard() first")
    return context


class StreamGuard:
    """Forward hooks that swap a model's random stream in and out around its outermost call."""

    def __init__(self, context: ShardContext, model: nn.Module) -> None:
        self._context = context
        self._dropouts = DropoutSites([model])
        self._entered: list[bool] = []

    def install(self, module: nn.Module) -> None:
        """Guard the calls of ``module``."""
        module.register_forward_pre_hook(self.enter, prepend=True)
        module.register_forward_hook(self.leave, always_call=True)

    def enter(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook."""
        if torch.compiler.is_compiling():
            if self._dropouts.live():
                _swap_in(self, module)
        else:
            self.swap_in(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook, called after an exception too."""
        if torch.compiler.is_compiling():
            if self._dropouts.live():
                _swap_out(self)
        else:
            self.swap_out()

    def swap_in(self, module: nn.Module) -> None:
        """Use the model's stream, unless the call recomputes a forward inside a backward."""
        recomputing = torch._C._current_graph_task_id() != -1  # no public way to ask whether a backward is running
        self._entered.append(not recomputing)
        if not recomputing:
            self._context.random.enter()
        elif self._dropouts.live():
            raise NotSupportedError(
                f"a checkpoint around the whole {type(module).__name__} recomputes it with other dropout masks: its "
                "random stream has moved on. Checkpoint its blocks instead (model.gradient_checkpointing_enable()), "
                "or set the dropout probabilities to 0."
            )

    def swap_out(self) -> None:
        """Give the user's random state back."""
        if self._entered and self._entered.pop():
            self._context.random.leave()


# Generator states cannot be traced; these break the graph, outside the blocks and only where a dropout is live.
@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _swap_in(guard: StreamGuard, module: nn.Module) -> None:
    guard.swap_in(module)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # untyped in torch
def _swap_out(guard: StreamGuard) -> None:
    guard.swap_out()
