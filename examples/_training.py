"""What a training needs besides its model and its loop: a schedule, a log, means over the ranks, and an end."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import shardcore
from shardcore_loop import ShardedDataLoader

Batch = TypeVar("Batch")


def is_first() -> bool:
    """Tell whether this rank speaks for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def replicas_of(tp: int) -> int:
    """Return how many models of ``tp`` ranks train together, after the first one was sharded."""
    return dist.get_world_size() // tp if dist.is_initialized() else 1


def say(text: str) -> None:
    """Print on the first rank."""
    if is_first():
        print(text, flush=True)


def endlessly(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Yield batches, epoch after epoch."""
    while True:
        yield from loader


def adamw(model: nn.Module, lr: float, weight_decay: float) -> Optimizer:
    """Return AdamW that lets matrices decay, and leaves norms and biases alone."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


def warm_up_then_cosine(optimizer: Optimizer, warm_up: int, steps: int, floor: float = 0.1) -> LambdaLR:
    """Let the learning rate rise over ``warm_up`` steps, then fall along half a cosine to ``floor`` of its peak."""

    def share(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = min(1.0, (step - warm_up) / max(1, steps - warm_up))
        return floor + (1 - floor) * (1 + math.cos(math.pi * done)) / 2

    return LambdaLR(optimizer, share)


def computing_in(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return what a forward runs in."""
    return torch.autocast(device.type, torch.bfloat16) if precision == "bfloat16" else contextlib.nullcontext()


def resume(
    checkpoints: Path, model: nn.Module, optimizer: Optimizer, *, schedule: LambdaLR, loader: ShardedDataLoader[Any]
) -> int:
    """Go on from the newest complete checkpoint, on any number of ranks; return how many steps were taken before."""
    loaded = shardcore.load_checkpoint(
        checkpoints, model, optimizer, scheduler=schedule, loader=loader, missing_ok=True
    )
    return 0 if loaded is None else loaded.step


def save(
    checkpoints: Path,
    model: nn.Module,
    optimizer: Optimizer,
    *,
    schedule: LambdaLR,
    loader: ShardedDataLoader[Any],
    step: int,
    settings: Any,
    wait: bool,
) -> None:
    """Write a checkpoint, in the background or, before the process ends, at once; keep the last ones."""
    shardcore.save_checkpoint(
        checkpoints,
        model,
        optimizer,
        scheduler=schedule,
        loader=loader,
        step=step,
        extra={"settings": asdict(settings)},
        keep_last=settings.keep,
        asynchronous=not wait,
    )


def export(model: Any, folder: Path) -> None:
    """Write the trained model as a standard checkpoint, which transformers reads without shardcore."""
    shardcore.wait_for_checkpoint(model)
    model.save_pretrained(folder)
    say(f"the trained model is in {folder}")


def whole(value: torch.Tensor) -> float:
    """Return a number that may be split over the ranks, as the norm of split gradients is."""
    return float(value.full_tensor() if isinstance(value, DTensor) else value)


def mean_over_ranks(total: torch.Tensor, count: int) -> float:
    """Return the mean of what all replicas have summed up; ranks of one replica say the same, which changes no mean."""
    both = torch.stack([total.detach().double(), torch.tensor(count, dtype=torch.float64, device=total.device)])
    if dist.is_initialized():
        dist.all_reduce(both)
    return float(both[0] / both[1])


def memory(device: torch.device) -> int:
    """Return the largest number of bytes that this rank has used: of its device, or of its process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes if sys.platform == "darwin" else kilobytes * 1024


class Log:
    """Writes what was measured, on the first rank: a line of JSON each time, and to TensorBoard if it is installed.

    A training that is taken up again at a step takes the steps after it once more: lines of theirs are removed.

    Args:
        folder: where `log.jsonl` and the files of TensorBoard are.
        step: where the training begins.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._file, self._board, self._seconds = None, None, 0.0
        if not is_first():
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "log.jsonl"
        kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step] if path.exists() else []
        path.write_text("".join(f"{line}\n" for line in kept))
        self._file = path.open("a", buffering=1)
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(folder, purge_step=step + 1)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time that the block takes as training; evaluations and checkpoints stay outside."""
        begin = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - begin

    def speed(self, count: float) -> float:
        """Return how many of ``count`` there were in each timed second since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return count / seconds

    def write(self, step: int, **values: float) -> None:
        """Write what was measured after ``step`` steps, and print it."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            print(f"step {step:6}", *(f"{name} {value:.4g}" for name, value in values.items()), sep="  ", flush=True)
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, step)


def _step_of(line: str) -> float:
    """Return the step of a line, or infinity if a kill has torn it."""
    try:
        entry: dict[str, Any] = json.loads(line)
    except ValueError:
        return math.inf
    return float(entry["step"])


def leave() -> None:
    """End this process when all ranks are done.

    With gloo, torch sometimes aborts while Python winds down. All is written: nothing is left to wind down.
    """
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)
