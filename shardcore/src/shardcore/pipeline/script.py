"""What a rehearsal found out of calls with arguments of some shapes: pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from shardcore.nn.loss.logits import VocabParallelLogits
from shardcore.pipeline.items import Items

__all__ = ["NOWHERE", "Crossing", "Script", "Value", "answer", "described"]

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


@dataclass(frozen=True, slots=True)
class SplitLogits:
    """Logits that are split over the vocabulary, which a head returns.

    Attributes:
        like: some of their form.
        value: this rank's part.
    """

    like: VocabParallelLogits
    value: Value

    def stand_in(self, device: torch.device | str, number: float = NOWHERE) -> VocabParallelLogits:
        """Return new ones, which are ``number`` everywhere."""
        return self.like.with_local(self.value.stand_in(device, number))


def described(tree: Any) -> Any:
    """Return a tree with a description in place of each tensor."""
    return tree_map(_described, tree)


def answer(description: Any, device: torch.device | str, number: float) -> Any:
    """Return a tree of tensors as ``description`` has them, every entry of which is ``number``."""
    if isinstance(description, Value):  # most parts return one tensor
        return description.stand_in(device, number)
    return tree_map_only((Value, SplitLogits), lambda value: value.stand_in(device, number), description)


def _described(leaf: Any) -> Any:
    if isinstance(leaf, VocabParallelLogits):
        return SplitLogits(leaf, Value.of(leaf.local))
    return Value.of(leaf) if isinstance(leaf, Tensor) else leaf


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
        forms: what the loss is made of; nothing where no loss function of torch has made it.
    """

    answers: Mapping[str, tuple[Any, ...]]
    crossings: tuple[Crossing, ...]
    missing: tuple[int, ...]
    loss: Value | None = None
    forms: tuple[Items, ...] = ()
