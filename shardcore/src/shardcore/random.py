"""The random numbers of a sharded model: seeding, saving and restoring its stream."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shardcore.errors import ConfigError
from shardcore.mesh.context import ShardContext, context_of, is_alone, unwrapped


def manual_seed(model: nn.Module, seed: int) -> None:
    """Restart the random stream of a sharded model (dropout masks, sampling in ``generate``) from ``seed``.

    Until then the stream follows torch's generator on the first of the ranks that share the model, so that masks agree
    on the ranks however each is seeded: each call that may draw starts it from a number of that generator. From here on
    it goes on by itself, and torch's generators are not touched. Call it on every rank; data-parallel replicas get
    different numbers from one seed.

    Args:
        model: a sharded model.
        seed: any non-negative integer.

    Raises:
        ConfigError: the model was not sharded.
    """
    if (context := _context(model, "manual_seed")) is None:
        torch.manual_seed(seed)
    else:
        context.reseed(seed)
        context.random.follows = False


def get_rng_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the random state of a sharded model: ``uint8`` tensors on the CPU, by device name.

    It is where the last call has left the stream: where the next one goes on, unless the stream follows torch's
    generator (see `manual_seed`). Equal on all ranks of a tensor-parallel group; save it once for each data-parallel
    replica.

    Raises:
        ConfigError: the model was not sharded.
    """
    context = _context(model, "get_rng_state")
    return {"cpu": torch.get_rng_state()} if context is None else context.random.state()


def set_rng_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Continue the random stream of a sharded model from ``state``, as `get_rng_state` returned it.

    As after `manual_seed` it follows torch's generator no more.

    Raises:
        ConfigError: the model was not sharded, or the state is for other devices.
    """
    context = _context(model, "set_rng_state")
    try:
        if context is None:
            torch.set_rng_state(state["cpu"])
        else:
            context.random.load(state)
            context.random.follows = False
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _context(model: nn.Module, caller: str) -> ShardContext | None:
    """Return the context, or None for a model that was sharded over one rank: it draws from torch's own generator."""
    model = unwrapped(model)
    if (context := context_of(model)) is None and not is_alone(model):
        raise ConfigError(f"{caller} got a {type(model).__name__} that was not sharded; call shardcore.shard() first")
    return context
