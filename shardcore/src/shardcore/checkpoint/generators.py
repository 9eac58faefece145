"""The random numbers of a training: the model's stream, and the generators of the process."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardcore.mesh import context_of

__all__ = ["generators_of", "set_generators"]


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
    """Continue from ``states``.

    Args:
        model: whose stream is set too.
        states: as `generators_of` returned them, of this replica.
        further: 0, or which one beyond the saved replicas this is: its stream is another one, drawn from theirs.
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
