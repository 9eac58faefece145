"""What tracing finds out of calls with arguments of some shapes, of which it keeps shapes and dtypes: pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

from shardcore.nn.libraries import ask
from shardcore.nn.loss.logits import VocabParallelLogits
from shardcore.pipeline.losses import Reduction

#: NaN stands for a value that another stage computes, wherever the forward asks for it: whatever it reaches shows it.
PROBE = math.nan


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """A tensor that a part of the model returns, or that crosses to the next stage.

    Attributes:
        shape: its shape.
        dtype: its dtype.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> TensorMeta:
        """Describe ``tensor``."""
        return cls(tuple(tensor.shape), tensor.dtype)

    @property
    def has_nan(self) -> bool:
        """Whether NaN can stand for its numbers."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def filled(self, device: torch.device | str, number: float, whole: int | None = None) -> Tensor:
        """Return a new tensor of this shape that is ``number`` everywhere, or ``whole`` if it has no NaN."""
        shown = number if self.has_nan or whole is None else whole
        return torch.full(self.shape, shown, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class SplitLogits:
    """Logits that are split over the vocabulary, which a head returns.

    Attributes:
        like: some of their form.
        meta: this rank's part.
    """

    like: VocabParallelLogits
    meta: TensorMeta

    def filled(self, device: torch.device | str, number: float, whole: int | None = None) -> VocabParallelLogits:
        """Return new ones, which are ``number`` everywhere."""
        return self.like.with_local(self.meta.filled(device, number))


def described(tree: Any) -> Any:
    """Return a tree with a description in place of each tensor."""
    return tree_map(_described, tree)


def filled(description: Any, device: torch.device | str, number: float, whole: int | None = None) -> Any:
    """Return a tree of tensors as ``description`` has them, every entry of which is as of `TensorMeta.filled`."""
    if isinstance(description, TensorMeta):  # most parts return one tensor
        return description.filled(device, number, whole)
    return tree_map_only((TensorMeta, SplitLogits), lambda meta: meta.filled(device, number, whole), description)


def captured() -> list[list[Any]]:
    """Return the lists in which libraries keep what is inside of blocks, such as scores of routers, in this forward."""
    return [values for ask_library in ask("", "captured") or () for values in ask_library()]


def answered(description: Any, device: torch.device | str, number: float, whole: int | None = None) -> Any:
    """Return what a part returns, `filled`, and keep what libraries would have captured inside of it."""
    out, inside = filled(description, device, number, whole)
    for values, more in zip(captured() if inside else (), inside, strict=True):
        values.extend(more)
    return out


def _described(leaf: Any) -> Any:
    if isinstance(leaf, VocabParallelLogits):
        return SplitLogits(leaf, TensorMeta.of(leaf.local))
    return TensorMeta.of(leaf) if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What crosses to a stage, the boundary activations: arguments with which its first block is called.

    So does what was captured inside of earlier blocks, if the loss is made of it.

    Attributes:
        block: the name of that block.
        places: where they are among all leaves of the call, positional arguments first, and of `captured`.
        values: what they are.
    """

    block: str
    places: tuple[int, ...]
    values: tuple[TensorMeta, ...]

    @classmethod
    def of(cls, block: str, places: Sequence[int], leaves: Sequence[Any]) -> Boundary:
        """Describe what is at some places among the leaves of a call."""
        values = tuple(TensorMeta.of(leaves[place]) for place in places)
        return cls(block=block, places=tuple(places), values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMetadata:
    """What all stages return and send for arguments of some shapes.

    Attributes:
        outputs: what each part of the model returns, and what is `captured` inside of it, by its name: a tree of
            `TensorMeta` for each call of it.
        boundaries: what crosses to stage 1, to stage 2, and so on.
        missing: which leaves of the model's output the last stage does not have: earlier stages compute them.
        loss: what the loss is, in float32 at least; None where nobody said how it is computed.
        reductions: what the loss is made of; nothing where no loss function of torch has made it.
    """

    outputs: Mapping[str, tuple[Any, ...]]
    boundaries: tuple[Boundary, ...]
    missing: tuple[int, ...]
    loss: TensorMeta | None = None
    reductions: tuple[Reduction, ...] = ()
