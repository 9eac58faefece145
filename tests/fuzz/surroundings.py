"""What a sharded model must leave alone: DTensors of others, and the store of the process group."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

__all__ = ["foreign", "keys_left"]


def foreign() -> dict[str, Any]:
    """Return what operations on DTensors that are nobody's give on this rank: a tensor, or the kind of an error."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found: dict[str, Any] = {}
    for name, work in _works():
        one = distribute_tensor(torch.arange(24.0).reshape(12, 2), mesh, [Shard(0)])
        torch.manual_seed(5)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # torch's own, of random numbers on CPUs
                out = work(one)
            found[name] = (one if out is None else out).to_local().clone()
        except Exception as error:
            found[name] = type(error)
    return found


def _works() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    yield "dropout", lambda one: F.dropout(one, 0.5)
    yield "uniform_", lambda one: one.uniform_()
    yield "bernoulli_", lambda one: one.bernoulli_(0.5)
    yield "slice assignment", _assigned
    yield "data", _replaced


def _assigned(one: Tensor) -> None:
    one[:, 0] = 7.0


def _replaced(one: Tensor) -> None:
    one.data = one.detach() * 2


def keys_left(forward: Callable[[], Any]) -> set[str]:
    """Return which keys eight forwards leave in the group's store, after four others; all ranks make the call.

    Those of the last barrier stay until the next one.
    """
    store = dist.distributed_c10d._get_default_store()
    kept = []
    for number in (4, 8):
        for _ in range(number):
            forward()
        dist.barrier()
        kept.append(set(store.list_keys()))
        dist.barrier()
    return kept[1] - kept[0] if len(kept[1]) > len(kept[0]) else set()
