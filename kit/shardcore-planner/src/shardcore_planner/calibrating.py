"""Measuring how fast this machine computes: the file that ``shardcore plan --card`` takes."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from shardcore_planner.cards import Card
from shardcore_planner.watch import Watch
from shardcore_planner.workload import DTYPES

#: By device: the side of the matrices that are multiplied, and the bytes that are copied.
_SIZES = {"cuda": (8192, 2**30), "cpu": (1024, 2**28)}
_ENOUGH = 2.0  # seconds of each measurement


def calibrated(device: str, tell: Callable[[str], None] = lambda line: None) -> Card:
    """Return the card of this machine; takes some ten seconds.

    Args:
        device: ``"cuda"`` or ``"cpu"``, with as many threads as torch has now.
        tell: is given a line of progress before each measurement.
    """
    side, held = _SIZES[device]
    products = {}
    for name, dtype in DTYPES.items():
        tell(f"products of {side} x {side} in {name}")
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        products[name] = 2 * side**3 / _least(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]  # typed by its use
    tell(f"copies of {held / 2**20:.0f} MiB")
    source = torch.empty(held, dtype=torch.uint8, device=device).fill_(1)
    target = torch.empty_like(source)
    memory = 2 * held / _least(lambda: target.copy_(source), device)
    tell("calls of operations that compute next to nothing")
    step = _small_step(device)
    step()
    with Watch() as watch:
        step()
    calls = sum(count for (what, *_), count in watch.work.items() if what == "calls")
    name = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine()
    return Card(name=name, device=device, products=products, memory=memory, call=_least(step, device) / calls)


def _small_step(device: str) -> Callable[[], None]:
    """Return a training step of many small modules, whose time is the host's."""

    def modules() -> Iterator[nn.Module]:
        for _ in range(50):
            yield from (nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())

    model, x = nn.Sequential(*modules()).to(device), torch.randn(2, 8, device=device)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=device == "cuda")

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _least(call: Callable[[], object], device: str) -> float:
    """Return the seconds of the fastest call, without the first, which may make what others find."""
    found: list[float] = []
    end = time.perf_counter() + _ENOUGH
    while len(found) < 3 or time.perf_counter() < end:
        _finish(device)
        start = time.perf_counter()
        call()
        _finish(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _finish(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
