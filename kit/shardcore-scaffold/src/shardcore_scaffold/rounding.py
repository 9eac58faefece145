"""How much of what a model computes is rounding: what follows from the last bits of its weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from shardcore_scaffold.infer import loss_of
from shardcore_testing.subject import adamw

_DEVIATIONS = (0.2, 0.1, 0.05)  # of random parameters; of fewer, more is lost in what they are added to
_CALM = 5e-15
_TIMES = 10  # what several steps of an optimizer make of it
_LEAST, _MOST = -12, -8  # powers of ten of a tolerance; more would hide mistakes


def change_of_gradients(model: nn.Module, inputs: Mapping[str, Any], *, steps: int = 0) -> float:
    """Return by how much of the largest gradient those of ``model`` change with the last bits of its weights.

    A sharded copy adds up in another order, and changes by as much. With ``steps`` of an optimizer before, which change
    ``model``.
    """
    other, last, generator = copy.deepcopy(model), torch.finfo(torch.float64).eps, torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1 + last * torch.randn(parameter.shape, dtype=torch.float64, generator=generator))
    for each in (model, other):
        optimizer = adamw(each)
        for step in range(steps + 1):
            if step:
                optimizer.step()
            optimizer.zero_grad()
            loss_of(each(**copy.deepcopy(inputs))).backward()
    found = []
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        if one.grad is not None and two.grad is not None and one.numel():
            found.append((float(one.grad.abs().max()), float((one.grad - two.grad).abs().max())))
    largest = max((size for size, _ in found), default=0.0)
    return max(change for _, change in found) / largest if largest else 0.0


def calmest(build: Callable[[float], nn.Module], inputs: Mapping[str, Any]) -> tuple[float, float]:
    """Return the deviation of random parameters with which rounding is least, or little, and the tolerance it needs.

    Args:
        build: makes a model in training mode with such parameters.
        inputs: of one call.
    """
    found: list[tuple[float, float]] = []
    for deviation in _DEVIATIONS:
        found.append((change_of_gradients(build(deviation), inputs, steps=1), deviation))
        if found[-1][0] <= _CALM:
            break
    change, deviation = min(found)
    power = math.ceil(math.log10(_TIMES * change)) if change else _LEAST
    return deviation, 10.0 ** min(max(power, _LEAST), _MOST)
