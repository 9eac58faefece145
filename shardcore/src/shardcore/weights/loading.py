"""Filling a model with the weights that were given to `shardcore.shard`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from shardcore._progress import Progress
from shardcore.errors import ConfigError, ShardcoreWarning
from shardcore.mesh import ShardContext, device_type_here
from shardcore.weights.filling import fill, part_bytes
from shardcore.weights.weights import Place, Weights

__all__ = ["Filling"]

_SHOWN = 8  # names in one warning


class Filling:
    """What is to be read into a model after it was sharded, and what has to hold for it before.

    Args:
        model: the model, unsharded yet.
        weights: where its values come from.
        sync_from: as given to `shardcore.shard`.

    Raises:
        ConfigError: the weights do not fit the model, or the values of a rank are to be taken as well.
    """

    def __init__(self, model: nn.Module, weights: Weights | Place, sync_from: int | None) -> None:
        if sync_from is not None:
            raise ConfigError(
                f"weights= and sync_from={sync_from} both say where the values come from; leave one of them out"
            )
        self._model = model
        self._weights = Weights.of(model, weights)
        self._warn_of_unused()

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield what has to be the same on every rank."""
        yield from self._weights.items()

    def apply(self, context: ShardContext | None) -> None:
        """Read this rank's part of every tensor."""
        device = torch.device(device_type_here()) if context is None else context.device
        files = self._weights.files
        place = "" if files is None else f" {files.place}"
        shown = not dist.is_initialized() or dist.get_rank() == 0
        with Progress(part_bytes(self._model), f"loading{place}", shown=shown) as progress:

            def done(count: int) -> None:
                progress.advance(count)
                if files is not None:
                    files.close()  # pages of it count as this process's as long as it is open

            fill(self._model, self._weights.recipes, device, done)

    def _warn_of_unused(self) -> None:
        unused = self._weights.unused
        if unused and (not dist.is_initialized() or dist.get_rank() == 0):
            more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
            warnings.warn(
                f"{self._weights.files.place if self._weights.files else ''} holds tensors that this "
                f"{type(self._model).__name__} has no place for: {', '.join(unused[:_SHOWN])}{more}; they are not read",
                ShardcoreWarning,
                stacklevel=4,  # where `shardcore.shard` was called
            )
