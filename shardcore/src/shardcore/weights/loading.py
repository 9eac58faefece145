"""Filling a model with the weights that were given to `shardcore.shard`."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from shardcore._progress import Progress
from shardcore.errors import ConfigError, ShardcoreWarning
from shardcore.mesh import ShardContext, device_type_here, group_of
from shardcore.plan import ShardPlan
from shardcore.plan.phases import ModelPhase
from shardcore.weights.filling import fill, needs_of, part_bytes
from shardcore.weights.reading import Reading, check_reading, neighbours_on_host, scatters
from shardcore.weights.scattering import Scatter, Slices
from shardcore.weights.weights import Place, Weights

__all__ = ["Filling"]

_SHOWN = 8  # names in one warning


class Filling(ModelPhase):
    """What is to be read into a model after it was sharded, and what has to hold for it before.

    Args:
        model: the model, unsharded yet.
        weights: where its values come from.
        sync_from: as given to `shardcore.shard`.
        reading: who reads the files.

    Raises:
        ConfigError: there is no such way to read, the weights do not fit the model, or the values of a rank are to be
            taken as well.
    """

    def __init__(self, model: nn.Module, weights: Weights | Place, sync_from: int | None, reading: Reading) -> None:
        self._reading = check_reading(reading)
        if sync_from is not None:
            raise ConfigError(
                f"weights= and sync_from={sync_from} both say where the values come from; leave one of them out"
            )
        self._model = model
        self._weights = Weights.of(model, weights)
        if self._weights.files is None and reading == "scatter":
            raise ConfigError("reading='scatter' reads safetensors files only; leave it out for pickled ones")
        self._warn_of_unused()

    def items(self) -> Iterator[tuple[str, str]]:
        """Yield what has to be the same on every rank."""
        yield from self._weights.items()
        yield "the argument reading", self._reading

    def runs(self, context: ShardContext | None) -> bool:
        """Also of a model that was not sharded."""
        return True

    def apply(self, context: ShardContext | None, plan: ShardPlan) -> None:
        """Read this rank's part of every tensor."""
        device = torch.device(device_type_here()) if context is None else context.device
        files = self._weights.files
        place = "" if files is None else f" {files.place}"
        way = self._way(context)
        shown = not dist.is_initialized() or dist.get_rank() == 0
        with Progress(part_bytes(self._model, self._weights.recipes), f"loading{place}", shown=shown) as progress:
            try:
                fill(self._model, self._weights.recipes, device, progress.advance, way)
            finally:
                if files is not None:
                    files.close()

    def _way(self, context: ShardContext | None) -> Slices:
        files = self._weights.files
        if context is None or files is None:
            return Slices()
        group = group_of(context.mesh)
        if not scatters(self._reading, {stored.file for stored in files.tensors.values()}, group):
            return Slices()
        return Scatter(neighbours_on_host(group), needs_of(self._model, self._weights.recipes))

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
