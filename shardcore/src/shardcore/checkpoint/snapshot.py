"""What a checkpoint holds of a training, as it lies on one rank; its random numbers among it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shardcore.agree.fingerprint import Item, checksum, libraries
from shardcore.checkpoint.ranks import RankGroup
from shardcore.checkpoint.state import ModelState, optimizer_state
from shardcore.checkpoint.values import encoded
from shardcore.errors import AgreementError, ConfigError
from shardcore.mesh.axes import DATA_AXES, axis_name
from shardcore.mesh.context import context_of, division_of
from shardcore.nn.mixin import native_class


def generators_of(model: nn.Module) -> dict[str, Any]:
    """Return the states of all generators, in the order of the devices instead of by name: other ranks have others."""
    context, device = context_of(model), _device(model)
    states = [torch.get_rng_state()]
    if device is not None:
        states.append(torch.get_device_module(device.type).get_rng_state())
    return {
        "model": states if context is None else list(context.random.state().values()),
        "follows": context is None or context.random.follows,
        "torch": states,
        "python": random.getstate(),
        "numpy": np.random.get_state(),
    }


def set_generators(model: nn.Module, states: dict[str, Any], *, further: int = 0) -> None:
    """Continue from ``states``, as `generators_of` returned them, with the stream of ``model`` too.

    ``further`` is 0, or which one beyond the saved replicas this is: its stream is another one, drawn from theirs.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    for at, state in enumerate(states["torch"]):
        if at == 0:
            torch.set_rng_state(state)
        elif (device := _device(model)) is not None:
            torch.get_device_module(device.type).set_rng_state(state)
    if (context := context_of(model)) is None:
        return
    devices, saved = list(context.random.state()), states["model"]
    if further or len(devices) != len(saved):
        context.reseed(_seed_of(saved, further))
    else:
        context.random.load(dict(zip(devices, saved, strict=True)))
    context.random.follows = states.get("follows", False)  # streams of older checkpoints never did


def _device(model: nn.Module) -> torch.device | None:
    """Return the device of the model's parameters, None for the CPU."""
    first = next(model.parameters(), None)
    return None if first is None or first.device.type in ("cpu", "meta") else first.device


def _seed_of(states: list[Tensor], further: int) -> int:
    digest = hashlib.sha256(repr(further).encode())
    for state in states:
        digest.update(state.numpy().tobytes())
    return int.from_bytes(digest.digest()[:7], "little")


def replica_of(model: nn.Module, ranks: RankGroup) -> tuple[int, int]:
    """Return which data-parallel replica this rank belongs to, counted from 0, and how many there are."""
    context = context_of(model)
    if context is None:
        return ranks.position, len(ranks.ranks)
    if any(axis_name(context.mesh, axis) for axis in DATA_AXES):
        return context.replica, context.sizes.replicas
    return ranks.position // context.mesh.size(), len(ranks.ranks) // context.mesh.size()


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state that is saved, as it lies on this rank."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # further names of tied ones
    index: dict[str, Any]  # what the first rank writes besides
    own: dict[str, Any]  # what this rank writes of its own
    stage: int | None  # the position of this rank in a pipeline, whose other ranks have other tensors; None without one
    first: int  # the first rank that has the tensors of this one, and tells what is to be known of them

    @classmethod
    def of(
        cls, model: nn.Module, ranks: RankGroup, optimizer: Optimizer | None, scheduler: Any, loader: Any, extra: Any
    ) -> Snapshot:
        """Take that of a training on this rank; errors are those of `save_checkpoint`."""
        state = ModelState.of(model)
        tensors = {f"model.{name}": tensor for name, tensor in state.tensors.items()}
        kept = None
        if optimizer is not None:
            held, kept = optimizer_state(optimizer, model)
            tensors |= {f"optimizer.state.{name}": tensor for name, tensor in held.items()}
        aliases = {f"model.{name}": f"model.{of}" for name, of in state.aliases.items()}
        context, division = context_of(model), division_of(model)
        axes = {} if context is None else dataclasses.asdict(context.sizes)
        index = {
            "torch": torch.__version__,
            "about": _about(model),
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
        stage, first = None, ranks.ranks[0]
        if division is not None and context is not None:
            names = context.mesh.mesh_dim_names or ()
            stage = division.position
            first = int(context.mesh.mesh.select(names.index("pp"), stage).flatten()[0])
        return cls(tensors=tensors, aliases=aliases, index=index, own=own, stage=stage, first=first)

    def items(self, arguments: Mapping[str, Any]) -> Iterator[Item]:
        """Yield what has to be equal on all ranks: of what is no DTensor one rank's is saved for all."""
        for name, value in arguments.items():
            yield f"the argument {name}", str(value)
        yield "the argument optimizer", "not given" if self.index["optimizer"] is None else "given"
        yield "the argument loader", "not given" if self.own["loader"] is None else "given"
        yield "the state of the scheduler", json.dumps(self.index["scheduler"])
        if (kept := self.index["optimizer"]) is not None:
            yield "the options of the optimizer", json.dumps([kept["kinds"], *(g["options"] for g in kept["groups"])])
        if self.stage is None:
            yield from self._items_of_tensors()

    def _items_of_tensors(self) -> Iterator[Item]:
        """Yield what has to be equal on all ranks that have the same tensors."""
        for name, tensor in self.tensors.items():
            yield f"the tensor {name}", f"{tuple(tensor.shape)} {tensor.dtype}"
        for name, tensor in self.tensors.items():
            if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DTensor):
                yield f"the plain parameter {name}", checksum(tensor)
        yield "the state of the optimizer", json.dumps(self.index["optimizer"])

    def of_own_stage(self, ranks: RankGroup) -> Snapshot:
        """Leave out tensors that an earlier stage of the pipeline has too; every rank makes the call.

        Raises:
            AgreementError: ranks that have the same stages differ.
        """
        if self.stage is None:
            return self
        digest = hashlib.sha256(repr(tuple(self._items_of_tensors())).encode()).hexdigest()
        told = ranks.shared((self.stage, digest, tuple(self.tensors)))

        def check() -> None:
            known: dict[int, tuple[int, str]] = {}
            for rank, (stage, other, _) in zip(ranks.ranks, told, strict=True):
                first, expected = known.setdefault(stage, (rank, other))
                if other != expected:
                    raise AgreementError(
                        f"ranks {first} and {rank} differ in the tensors of their stage, or in the state of the "
                        "optimizer. Nothing was written; call save_checkpoint on the same model with the same "
                        "arguments."
                    )

        ranks.together(check)
        elsewhere = {name for stage, _, names in told if stage < self.stage for name in names}
        own = {name: tensor for name, tensor in self.tensors.items() if name not in elsewhere}
        return dataclasses.replace(self, tensors=own)


def merged(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Return what is written once for all ranks, of what each of them would write."""
    indices = [snapshot.index for snapshot in snapshots]
    whole = dict(indices[0])
    if snapshots[0].stage is None:
        return whole
    whole["modules"] = {name: value for index in indices for name, value in (index["modules"] or {}).items()}
    if whole["optimizer"] is not None:
        groups = [dict(group, parameters={}) for group in whole["optimizer"]["groups"]]
        for index in indices:
            for group, own in zip(groups, index["optimizer"]["groups"], strict=True):
                group["parameters"] |= own["parameters"]
        whole["optimizer"] = {**whole["optimizer"], "groups": groups}
    return whole


def _about(model: nn.Module) -> dict[str, Any]:
    """Return what a checkpoint says about its model, as JSON, for whoever looks at it without having it.

    The class as it was before the model was sharded, its configurations, and the versions of the libraries and of the
    pack whose policy it was sharded by.
    """
    kinds = (kind for kind in type(model).__mro__ if issubclass(kind, nn.Module) and not issubclass(kind, FSDPModule))
    cls = native_class(next(kinds))
    context = context_of(model)
    pack, _, version = ("" if context is None else context.origin).partition(" ")
    return {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "config": _as_data(getattr(model, "config", None)),
        "generation_config": _as_data(getattr(model, "generation_config", None)),
        "libraries": {**libraries(model), **({pack: version} if pack else {})},
    }


def _as_data(config: Any) -> Any:
    """Return a configuration in its own words; None of what has no such words."""
    return json.loads(config.to_json_string()) if callable(getattr(config, "to_json_string", None)) else None


def _state_dict(name: str, holder: Any) -> Any:
    if not callable(getattr(holder, "state_dict", None)) or not callable(getattr(holder, "load_state_dict", None)):
        raise ConfigError(
            f"{name}= must have state_dict() and load_state_dict(), and a {type(holder).__name__} has not; leave it out"
        )
    return holder.state_dict()
