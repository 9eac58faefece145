"""What a rehearsal found out of calls with arguments of some shapes: pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["NOWHERE", "Crossing", "Script", "Value"]

#: What stands for a value that another stage computes, wherever the forward asks for it: whatever it reaches shows it.
NOWHERE = math.nan


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that a part of the model returns, or that crosses to the next stage.

    Attributes:
        shape: its shape.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> Value:
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def stand_in(self, device: torch.device | str, number: float = NOWHERE) -> Tensor:
        """Return a new tensor of this shape that is ``number`` everywhere."""
        return torch.full(self.shape, number, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossing:
    """What crosses to a stage: arguments with which its first block is called.

    Attributes:
        block: the name of that block.
        places: where they are among all leaves of the call, positional arguments first.
        values: what they are.
    """

    block: str
    places: tuple[int, ...]
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """How the forwards of all stages go for arguments of some shapes.

    Attributes:
        answers: what each part of the model returns, by its name: a tree of `Value` for each call of it.
        crossings: what crosses to stage 1, to stage 2, and so on.
        missing: which leaves of the model's output the last stage does not have: earlier stages compute them.
        loss: what the loss is; None where nobody said how it is computed.
    """

    answers: Mapping[str, tuple[Any, ...]]
    crossings: tuple[Crossing, ...]
    missing: tuple[int, ...]
    loss: Value | None = None
