"""What tracing finds out of calls with arguments of some shapes, of which it keeps shapes and dtypes.

A shape and a dtype are a tensor on meta, the *form* of others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from shardcore.nn.libraries import ask
from shardcore.nn.loss.logits import VocabParallelLogits
from shardcore.pipeline.losses import Reduction
from shardcore.transfer.fp8 import Fp8Wire

#: NaN stands for a value that another stage computes, wherever the forward asks for it: whatever it reaches shows it.
PROBE = math.nan


def form_of(tensor: Tensor) -> Tensor:
    """Return the form of ``tensor``: one on meta of its shape and dtype, which holds nothing."""
    gradient = tensor.dtype.is_floating_point
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=gradient)


def described(tree: Any) -> Any:
    """Return a tree with the form of each tensor in its place."""
    return _each(form_of, tree)


def filled(description: Any, device: torch.device | str, number: float, whole: int | None = None) -> Any:
    """Return a tree of new tensors as ``description`` has them, which are ``number`` everywhere.

    Those that have no NaN are ``whole``, if it is given.
    """

    def tensor(form: Tensor) -> Tensor:
        has_nan = form.dtype.is_floating_point or form.dtype.is_complex
        shown = number if has_nan or whole is None else whole
        return torch.full(form.shape, shown, dtype=form.dtype, device=device)

    return tensor(description) if isinstance(description, Tensor) else _each(tensor, description)


def _each(change: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return a tree in which each tensor is changed; of logits that are split over the vocabulary, this rank's part."""

    def changed(leaf: Tensor | VocabParallelLogits) -> Tensor | VocabParallelLogits:
        return leaf.changed(change) if isinstance(leaf, VocabParallelLogits) else change(leaf)

    return tree_map_only((Tensor, VocabParallelLogits), changed, tree)


def captured() -> list[list[Any]]:
    """Return the lists in which libraries keep what is inside of blocks, such as scores of routers, in this forward."""
    return [values for ask_library in ask("", "captured") or () for values in ask_library()]


def answered(description: Any, device: torch.device | str, number: float, whole: int | None = None) -> Any:
    """Return what a part returns, `filled`, and keep what libraries would have captured inside of it."""
    out, inside = description
    for values, more in zip(captured() if inside else (), inside, strict=True):
        values.extend(filled(more, device, number, whole))
    return filled(out, device, number, whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """What crosses to a stage, the boundary activations: arguments with which its first block is called.

    So does what was captured inside of earlier blocks, if the loss is made of it.

    Attributes:
        block: the name of that block.
        places: where they are among all leaves of the call, positional arguments first, and of `captured`.
        values: their forms.
    """

    block: str
    places: tuple[int, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def of(cls, block: str, places: Sequence[int], leaves: Sequence[Any]) -> Boundary:
        """Describe what is at some places among the leaves of a call."""
        values = tuple(form_of(leaves[place]) for place in places)
        return cls(block=block, places=tuple(places), values=values)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMetadata:
    """What all stages return and send for arguments of some shapes.

    Attributes:
        outputs: what each part of the model returns, and what is `captured` inside of it, by its name: a tree of
            the forms of tensors for each call of it.
        boundaries: what crosses to stage 1, to stage 2, and so on.
        missing: which leaves of the model's output the last stage does not have: earlier stages compute them.
        loss: the dtype of the loss, float32 at least; None where nobody said how it is computed.
        reductions: what the loss is made of; nothing where no loss function of torch has made it.
        fp8: what crosses travels in 8 bits.
    """

    outputs: Mapping[str, tuple[Any, ...]]
    boundaries: tuple[Boundary, ...]
    missing: tuple[int, ...]
    loss: torch.dtype | None = None
    reductions: tuple[Reduction, ...] = ()
    fp8: bool = False

    def sent(self, stage: int) -> tuple[Tensor, ...]:
        """Return the forms of what is sent to a stage; nothing where none is sent."""
        values = self.boundaries[stage - 1].values if 0 < stage <= len(self.boundaries) else ()
        return tuple(map(Fp8Wire.form, values)) if self.fp8 else values
