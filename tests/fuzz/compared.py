"""What the calls of a draw gave, and the comparison of two models by it; nothing here is shardcore's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

__all__ = ["BOUND", "Outcome", "Record", "flat", "outputs_of", "weighted", "whole"]

#: The largest difference that rounding in float64 makes, relative to the largest value.
BOUND = 1e-11


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (a collective on its mesh), a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat(out: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model's output with their names; caches are left out."""
    if isinstance(out, Tensor):
        yield prefix or "output", out
    elif hasattr(type(out), "full_tensor"):  # logits that are divided over ``cp``
        yield prefix, out.full_tensor()
    elif isinstance(out, Mapping):
        for name, value in out.items():
            yield from flat(value, f"{prefix}.{name}" if prefix else str(name))
    elif isinstance(out, list | tuple):
        for index, value in enumerate(out):
            yield from flat(value, f"{prefix}[{index}]")


@dataclass
class Record:
    """What one call of a run gave.

    Attributes:
        title: for messages.
        values: outputs, losses, parameters.
        gradients: of parameters and inputs.
    """

    title: str
    values: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of a draw on one rank.

    Attributes:
        state: ``equal``, ``refused`` (as it has to be), ``unsharded`` (the unsharded model cannot do it), ``failed``.
        error: the largest relative difference.
        compared: the number of tensors that were compared.
        problems: what differs.
        bound: the largest difference that is rounding.
    """

    state: str = "equal"
    error: float = 0.0
    compared: int = 0
    problems: list[str] = field(default_factory=list)
    bound: float = BOUND

    def compare_records(self, wanted: Record, got: Record) -> None:
        """Compare what one call gave."""
        for key in dict.fromkeys([*wanted.values, *got.values]):
            self.compare(f"{wanted.title}: {key}", wanted.values.get(key), got.values.get(key))
        # Some true gradients are zero (key biases): errors are measured by the largest gradient of the model.
        sizes = (g.abs().nan_to_num(posinf=0.0) for g in wanted.gradients.values() if g is not None and g.numel())
        scale = max((float(size.max()) for size in sizes), default=0.0)
        for key in dict.fromkeys([*wanted.gradients, *got.gradients]):
            mine, theirs = wanted.gradients.get(key), got.gradients.get(key)
            self.compare(f"{wanted.title}: gradient of {key}", mine, theirs, scale)

    def compare(self, name: str, wanted: Tensor | None, got: Tensor | None, scale: float = 0.0) -> None:
        """Compare two tensors; both may be missing."""
        if wanted is None or got is None:
            if wanted is not got:
                self.problems.append(f"{name}: {_shape(wanted)} unsharded, {_shape(got)} sharded")
            return
        wanted, got = wanted.detach(), whole(got.detach())
        if wanted.shape != got.shape:
            self.problems.append(f"{name}: {_shape(wanted)} unsharded, {_shape(got)} sharded")
            return
        self.compared += 1
        wanted, got = wanted.double(), got.double()
        finite = wanted.isfinite() & got.isfinite()
        if not torch.allclose(wanted[~finite], got[~finite], equal_nan=True):
            self.problems.append(f"{name}: other values that are not finite")
            return
        wanted, got = wanted[finite], got[finite]
        if not wanted.numel():
            return
        largest = scale or float(wanted.abs().max()) or 1.0
        error = float((wanted - got).abs().max()) / largest
        self.error = max(self.error, error)
        if error > self.bound:
            self.problems.append(f"{name}: relative difference {error:.3g}")


def _shape(tensor: Tensor | None) -> str:
    return "nothing" if tensor is None else str(tuple(tensor.shape))


def outputs_of(out: Any, skip: Sequence[str] = ()) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an output, but for those of some names."""
    if isinstance(out, Tensor) or not hasattr(out, "items"):
        yield from flat(out)
        return
    for name, value in out.items():
        if name not in skip:
            yield from flat(value, str(name))


def weighted(out: Any) -> Tensor:
    """Return a mean of everything in an output, with weights that are drawn: every element counts."""
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros((), dtype=torch.float64)
    for _, tensor in flat(out):
        if tensor.is_floating_point() and tensor.numel():
            weights = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
            total = total + (tensor * weights).mean()
    return total
