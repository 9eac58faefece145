"""A rank that calls a sharded model alone is told in seconds: all that need each other meet before each call.

By default nobody watches, and a rank that is alone waits for as long as the process group lets it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch.compiler
from torch import nn
from typing_extensions import override

from shardcore.agree.store_barrier import StoreBarrier
from shardcore.errors import ConfigError
from shardcore.mesh.axes import axis_name
from shardcore.mesh.context import ShardContext, context_of, is_alone
from shardcore.nn.base import ParallelMixin
from shardcore.nn.mixin import add_mixin


def watch(model: nn.Module, seconds: float = 30.0) -> None:
    """Let the ranks that need each other in a call of ``model`` meet before each; without all of them it is an error.

    They meet in the store of the process group, whatever device the model is on: about 2 ms for a call.

    Args:
        model: sharded; not one of a pipeline, whose steps are no calls of it. Every rank makes this call.
        seconds: for which a rank waits for the others, more than loading a batch, compiling, or writing a file takes.

    Raises:
        ConfigError: it is another model, or this is no time to wait.
    """
    if not seconds > 0:
        raise ConfigError(f"seconds must be more than 0, not {seconds}")
    if is_alone(model):
        return
    context = context_of(model)
    if context is None or context.sizes.pp > 1:
        raise ConfigError("shardcore_debug.watch takes a model that shard() has returned, without a pipeline")
    add_mixin(model, Watched)
    model.__dict__.update(_watched_ranks=_needed(context), _watched_seconds=seconds)


class Watched(ParallelMixin):
    """A model whose ranks meet before each call and each generation."""

    keeps_name: ClassVar[bool] = True

    _watched_ranks: tuple[int, ...]
    _watched_seconds: float

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, if all ranks do.

        Raises:
            MissingRanksError: some have not come in time.
        """
        if not torch.compiler.is_compiling():
            self._meet()
        return super().__call__(*args, **kwargs)

    def compare_generation(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Begin a generation; see `shardcore.nn.same_inputs.SameInputs`."""
        self._meet()
        super().compare_generation(args, kwargs)  # type: ignore[misc]  # of the mixin inside, which alone is asked

    def _meet(self) -> None:
        lost = (
            f"this {type(self).__name__} is called by ranks {', '.join(map(str, self._watched_ranks))} together, and "
            f"these did not come within {self._watched_seconds:g} s: {{ranks}}. Look for an error on them, and call "
            "the model on all of its ranks alike, outside of any `if rank == 0`. If they were merely late, give "
            "watch() more seconds."
        )
        StoreBarrier.wait(self._watched_ranks, {}, "watched call", self._watched_seconds, lost)


def _needed(context: ShardContext) -> tuple[int, ...]:
    """Return the ranks that need each other in a forward: all but copies of the model, of which each has all parts."""
    ranks = context.mesh.mesh
    if (name := axis_name(context.mesh, "dp_replicate")) is not None:
        axis, place = (context.mesh.mesh_dim_names or ()).index(name), context.mesh.get_coordinate() or ()
        ranks = ranks.select(axis, place[axis])
    return tuple(int(rank) for rank in ranks.flatten())
