"""Host cost of a column and row pair under every system: CPU time on a process group that transfers nothing."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["PLAIN", "Cost", "host_costs"]

#: The system that the others are compared with.
PLAIN = "plain local parameters"

_STEPS = 50  # in one turn: short turns, so that a disturbance meets both sides of a ratio


class Pair(nn.Module):
    """A column and a row linear, small enough that only the host matters."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(16, inner, bias=False)
        self.down = nn.Linear(inner, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., 16)."""
        return self.down(self.up(x))  # type: ignore[no-any-return]  # modules return Any


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class PlainPair(Pair):
    """The pair by hand, on plain local parameters and torch's public collectives."""

    def __init__(self) -> None:
        super().__init__(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., 16)."""
        return _Exit.apply(self.down(self.up(_Enter.apply(x))))  # type: ignore[no-any-return,no-untyped-call]


def _shardcore() -> nn.Module:
    from shardcore.mesh.context import ShardContext
    from shardcore.nn import ColumnLinear, RowLinear
    from shardcore.nn.randomness import DropoutSites
    from shardcore.nn.region.inner import SoleRegion

    context = ShardContext.of(init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    pair = Pair()
    ColumnLinear.from_native_module(pair.up, context, enters=False)
    RowLinear.from_native_module(pair.down, context)
    # As the MLPs of BERT, ViT and Whisper are planned: `region(col="up", row="down")`.
    up: Any = pair.up  # a column linear now, and `down` a row linear
    up.sole_region = pair.down.region = SoleRegion(context, up, DropoutSites([pair]))  # type: ignore[assignment]
    return pair


def _dtensor() -> nn.Module:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    return parallelize_module(Pair(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


@dataclass
class Cost:
    """Microseconds of CPU time for each pair, by turn."""

    training: list[float]  # forward and backward
    inference: list[float]  # forward under no_grad

    @staticmethod
    def ratio(times: list[float], against: list[float]) -> float:
        """Return the median over the turns of how much longer one took than the other."""
        return statistics.median(a / b for a, b in zip(times, against, strict=True))


def host_costs(rounds: int) -> dict[str, Cost]:
    """Measure every system, ``10 * rounds`` turns each."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.set_num_threads(1)
    pairs = {"unsharded": Pair(), PLAIN: PlainPair(), "shardcore": _shardcore(), "DTensor activations": _dtensor()}
    costs = {name: Cost([], []) for name in pairs}
    for pair in pairs.values():
        _train(pair, 100)
        _infer(pair, 100)
    for _ in range(10 * rounds):
        for name, pair in pairs.items():
            costs[name].training.append(_train(pair, _STEPS))
        for name, pair in pairs.items():
            costs[name].inference.append(_infer(pair, _STEPS))
    dist.destroy_process_group()
    return costs


def _train(pair: nn.Module, steps: int) -> float:
    x = torch.randn(2, 4, 16, requires_grad=True)
    start = time.process_time()
    for _ in range(steps):
        pair(x).sum().backward()
        pair.zero_grad(set_to_none=True)
    return (time.process_time() - start) / steps * 1e6


def _infer(pair: nn.Module, steps: int) -> float:
    x = torch.randn(2, 4, 16)
    with torch.no_grad():
        start = time.process_time()
        for _ in range(steps):
            pair(x)
        return (time.process_time() - start) / steps * 1e6
