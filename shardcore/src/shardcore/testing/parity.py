"""Comparing a sharded model with the unsharded one it was made from.

Names come from the UNSHARDED model: a parameter that the sharded model lost is an error, not one thing less to compare.
Errors are relative to the largest gradient of the whole model, because some true gradients are zero (key biases).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardcore.comm.reads import local_tensor

__all__ = [
    "assert_close",
    "assert_gradients_own_storage",
    "assert_same_gradients",
    "assert_same_parameters",
    "gradient_errors",
    "parameter_errors",
    "shared_gradients",
    "whole",
]


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (a collective on its mesh), a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _errors(
    reference: nn.Module, sharded: nn.Module, read: Callable[[nn.Parameter], Tensor | None]
) -> dict[str, float]:
    """Return the largest difference for each of the reference's names, relative to the largest value of all."""
    mine = dict(sharded.named_parameters(remove_duplicate=False))
    values: dict[str, tuple[Tensor, Tensor]] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        if name not in mine:
            raise AssertionError(f"the sharded model has no parameter {name!r}")
        wanted, got = read(parameter), read(mine[name])
        if (wanted is None) != (got is None):
            raise AssertionError(f"{name}: unsharded {_kind(wanted)}, sharded {_kind(got)}")
        if wanted is not None and got is not None:
            full = whole(got.detach())
            if full.shape != wanted.shape:  # they may broadcast
                raise AssertionError(f"{name}: unsharded {_kind(wanted)}, sharded {_kind(full)}")
            values[name] = (wanted.detach(), full)
    scale = max((float(w.abs().max()) for w, _ in values.values()), default=1.0) or 1.0
    return {name: float((w - g).abs().max()) / scale for name, (w, g) in values.items()}


def _kind(tensor: Tensor | None) -> str:
    return "has none" if tensor is None else f"has one of shape {tuple(tensor.shape)}"


def gradient_errors(reference: nn.Module, sharded: nn.Module) -> dict[str, float]:
    """Return the error of every gradient, by the unsharded model's names, relative to its largest gradient."""
    return _errors(reference, sharded, lambda p: p.grad)


def parameter_errors(reference: nn.Module, sharded: nn.Module) -> dict[str, float]:
    """Return the error of every parameter, by the unsharded model's names, relative to its largest parameter."""
    return _errors(reference, sharded, lambda p: p)


def shared_gradients(model: nn.Module) -> list[tuple[str, str]]:
    """Return the pairs of parameters of ``model`` whose gradients overlap in memory.

    What is added to one of them, or scales it, then does the same to the other. Views of one buffer that do not overlap
    are no pair.
    """
    spans = []
    for name, parameter in model.named_parameters():
        grad = parameter.grad
        local = None if grad is None else local_tensor(grad)
        if local is not None and local.numel():
            last = sum((size - 1) * stride for size, stride in zip(local.shape, local.stride(), strict=True))
            spans.append((local.data_ptr(), local.data_ptr() + (last + 1) * local.element_size(), name))
    spans.sort()
    return [(first, second) for (_, end, first), (start, _, second) in itertools.pairwise(spans) if start < end]


def assert_same_gradients(reference: nn.Module, sharded: nn.Module, tolerance: float = 1e-12) -> None:
    """Raise AssertionError, naming every offender, unless all gradients agree within ``tolerance``."""
    _assert_small("gradient", gradient_errors(reference, sharded), tolerance)


def assert_gradients_own_storage(model: nn.Module) -> None:
    """Raise AssertionError, naming both, if two gradients of ``model`` overlap in memory; see `shared_gradients`."""
    for first, second in shared_gradients(model):
        raise AssertionError(f"the gradients of {first} and {second} share storage: they are accumulated as one")


def assert_same_parameters(reference: nn.Module, sharded: nn.Module, tolerance: float = 1e-10) -> None:
    """Raise AssertionError, naming every offender, unless all parameters agree within ``tolerance``.

    The bound is wider than that of gradients: Adam divides what has no true gradient (the bias of a key) by its own
    rounding errors.
    """
    _assert_small("parameter", parameter_errors(reference, sharded), tolerance)


def assert_close(wanted: Tensor, got: Tensor, what: str, tolerance: float = 1e-12) -> None:
    """Raise AssertionError unless two tensors agree within ``tolerance`` of the largest wanted value."""
    got = whole(got)
    if wanted.shape != got.shape:
        raise AssertionError(f"{what}: wanted shape {tuple(wanted.shape)}, got {tuple(got.shape)}")
    if not wanted.numel():
        return
    scale = float(wanted.detach().abs().max()) or 1.0
    error = float((wanted.detach().to(torch.float64) - got.detach().to(torch.float64)).abs().max()) / scale
    if not error <= tolerance:  # written so that NaN fails
        raise AssertionError(f"{what}: relative difference {error:.3g} is above {tolerance:.3g}")


def _assert_small(what: str, errors: Mapping[str, float], tolerance: float) -> None:
    if not errors:
        raise AssertionError(f"no {what} was compared")
    bad = {name: error for name, error in errors.items() if not error <= tolerance}
    if bad:
        listed = ", ".join(f"{name} {error:.3g}" for name, error in bad.items())
        raise AssertionError(f"{len(bad)} of {len(errors)} {what}s differ by more than {tolerance:.3g}: {listed}")
