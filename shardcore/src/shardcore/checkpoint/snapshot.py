"""What a checkpoint holds of a training, as it lies on one rank."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardcore.agree.fingerprint import checksum
from shardcore.checkpoint.describing import described
from shardcore.checkpoint.generators import generators_of
from shardcore.checkpoint.ranks import Item, Ranks
from shardcore.checkpoint.state import ModelState, OptimizerState
from shardcore.checkpoint.values import encoded
from shardcore.errors import ConfigError
from shardcore.mesh import DATA_AXES, axis_name, context_of, division_of

__all__ = ["Snapshot", "replica_of"]


def replica_of(model: nn.Module, ranks: Ranks) -> tuple[int, int]:
    """Return which data-parallel replica this rank belongs to, counted from 0, and how many there are."""
    context = context_of(model)
    if context is None:
        return ranks.position, len(ranks.ranks)
    if any(axis_name(context.mesh, axis) for axis in DATA_AXES):
        return context.replica, context.sizes.replicas
    return ranks.position // context.mesh.size(), len(ranks.ranks) // context.mesh.size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state that is saved, as it lies on this rank.

    Attributes:
        tensors: by name.
        aliases: further names of tied ones.
        index: what the first rank writes besides.
        own: what this rank writes of its own.
        divided: other ranks of a pipeline have other tensors.
    """

    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    index: dict[str, Any]
    own: dict[str, Any]
    divided: bool

    @classmethod
    def of(
        cls, model: nn.Module, ranks: Ranks, optimizer: Optimizer | None, scheduler: Any, loader: Any, extra: Any
    ) -> Snapshot:
        """Take that of a training on this rank.

        Raises:
            CheckpointError: something cannot be stored.
            ConfigError: an argument does not fit.
            NotSupportedError: a tensor lies on the ranks in a way that cannot be described.
        """
        state = ModelState.of(model)
        tensors = {f"model.{name}": tensor for name, tensor in state.tensors.items()}
        divided = division_of(model) is not None
        kept = None
        if optimizer is not None:
            held = OptimizerState.of(optimizer, model)
            tensors |= {f"optimizer.state.{name}": tensor for name, tensor in held.tensors.items()}
            kept = {"kinds": held.kinds, "groups": held.groups}
        aliases = {f"model.{name}": f"model.{of}" for name, of in state.aliases.items()}
        context = context_of(model)
        axes = {} if context is None else dataclasses.asdict(context.sizes)
        index = {
            "torch": torch.__version__,
            "about": described(model),
            "aliases": aliases,
            "world": len(ranks.ranks),
            "axes": {name: size for name, size in axes.items() if size > 1},
            "extra": encoded(extra, "extra") if ranks.is_first else None,
            "scheduler": None if scheduler is None else encoded(_state_dict("scheduler", scheduler), "scheduler"),
            "modules": encoded(state.values, "the state of a module"),
            "optimizer": kept,
        }
        own = {
            "replica": replica_of(model, ranks)[0],
            "generators": encoded(generators_of(model), "the generators"),
            "loader": None if loader is None else encoded(_state_dict("loader", loader), "loader"),
        }
        return cls(tensors=tensors, aliases=aliases, index=index, own=own, divided=divided)

    def items(self, arguments: Mapping[str, Any]) -> Iterator[Item]:
        """Yield what has to be equal on all ranks: of what is no DTensor one rank's is saved for all."""
        for name, value in arguments.items():
            yield f"the argument {name}", str(value)
        yield "the argument optimizer", "not given" if self.index["optimizer"] is None else "given"
        yield "the argument loader", "not given" if self.own["loader"] is None else "given"
        yield "the state of the scheduler", json.dumps(self.index["scheduler"])
        if (kept := self.index["optimizer"]) is not None:
            yield "the options of the optimizer", json.dumps([kept["kinds"], *(g["options"] for g in kept["groups"])])
        if not self.divided:
            yield from self.items_of_tensors()

    def items_of_tensors(self) -> Iterator[Item]:
        """Yield what has to be equal on all ranks that have the same tensors."""
        for name, tensor in self.tensors.items():
            yield f"the tensor {name}", f"{tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in self.tensors.items():
            if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor):
                yield f"the plain parameter {name}", checksum(tensor)
        yield "the state of the optimizer", json.dumps(self.index["optimizer"])


def _state_dict(name: str, holder: Any) -> Any:
    if not callable(getattr(holder, "state_dict", None)) or not callable(getattr(holder, "load_state_dict", None)):
        raise ConfigError(
            f"{name}= must have state_dict() and load_state_dict(), and a {type(holder).__name__} has not; leave it out"
        )
    return holder.state_dict()
