"""A sharded model as PEFT has to see it while it makes adapters: with parameters of whole sizes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor


@contextlib.contextmanager
def of_whole_sizes(model: nn.Module) -> Iterator[None]:
    """Put plain parameters of whole sizes, without values or memory, in the places of the DTensors of ``model``.

    PEFT takes the sizes of an adapter from what one rank has of a DTensor. Which parameters need gradients is brought
    back to the DTensors at the end.
    """
    there: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                there.append((module._parameters, name, parameter))
                if parameter not in made:
                    made[parameter] = _like(parameter)
    for held, name, parameter in there:
        held[name] = made[parameter]
    try:
        yield
    finally:
        for held, name, parameter in there:
            if held.get(name) is made[parameter]:
                held[name] = parameter
        for parameter, stand_in in made.items():
            parameter.requires_grad_(stand_in.requires_grad)


def _like(parameter: nn.Parameter) -> nn.Parameter:
    one = torch.zeros((), dtype=parameter.dtype, device=parameter.device)
    return nn.Parameter(one.expand(parameter.shape), requires_grad=parameter.requires_grad)
