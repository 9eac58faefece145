"""Comparing a sharded model with the unsharded one it was made from.

Names come from the UNSHARDED model: a parameter that the sharded model lost is an error, not one thing less to compare.
Errors are relative to the largest gradient of the whole model, because some true gradients are zero (key biases).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor (a collective on its mesh), a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor without a gradient, a plain tensor as it is."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def equal_on_ranks(tensor: Tensor) -> bool:
    """Tell whether all ranks hold bit-equal tensors of one shape; of a DTensor, bit-equal parts (a collective)."""
    mine = part_of(tensor.detach())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return all(part.shape == mine.shape and torch.equal(part, mine) for part in parts)


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
            if got.shape != wanted.shape:  # they may broadcast
                raise AssertionError(f"{name}: unsharded {_kind(wanted)}, sharded {_kind(got)}")
            values[name] = (wanted.detach(), got.detach())
    scale = max((float(w.abs().max()) for w, _ in values.values()), default=1.0) or 1.0
    return {name: error / scale for name, error in _largest(values).items()}


def _largest(values: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the largest difference of each wanted tensor and its sharded one, over all ranks of its mesh.

    A rank compares what it holds with its part of the wanted tensor, so that every copy of a replicated tensor is
    compared, and one collective for each axis of a mesh tells all errors.
    """
    errors: dict[str, float] = {}
    of_mesh: dict[DeviceMesh, list[str]] = {}
    for name, (wanted, got) in values.items():
        parts = _parts(wanted, got)
        if parts is None:
            errors[name] = _distance(wanted, whole(got))
        else:
            errors[name] = float("inf") if parts[0].shape != parts[1].shape else _distance(*parts)
            of_mesh.setdefault(cast(DTensor, got).device_mesh, []).append(name)
    for mesh, names in of_mesh.items():
        # The maximum of a backend may pass over NaN.
        largest = torch.tensor([errors[name] for name in names], dtype=torch.float64, device=mesh.device_type)
        largest = largest.nan_to_num(nan=float("inf"), posinf=float("inf"))
        for axis in range(mesh.ndim):
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=mesh.get_group(axis))
        errors |= dict(zip(names, largest.tolist(), strict=True))
    return errors


def _parts(wanted: Tensor, got: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return this rank's part of ``wanted`` and what it holds; None for what only `full_tensor` puts together."""
    if not isinstance(got, DTensor) or any(type(placed) not in (Shard, Replicate) for placed in got.placements):
        return None
    part = distribute_tensor(wanted.to(got.device), got.device_mesh, got.placements, src_data_rank=None)
    return part.to_local(), got.to_local()


def _distance(wanted: Tensor, got: Tensor) -> float:
    return float((wanted - got).abs().max()) if wanted.numel() else 0.0


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
        local = None if grad is None else part_of(grad)
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
