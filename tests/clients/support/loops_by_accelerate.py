"""One training by a loop of Accelerate, sharded or not: what tests of the Accelerator compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader

import shardcore
from trainings_by_clients import llama, words  # from support/


def warmed(optimizer: Any, replicas: int) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3 * replicas)
    second = lr_scheduler.ExponentialLR(optimizer, 0.9 ** (1 / replicas))
    return lr_scheduler.SequentialLR(optimizer, [first, second], [3 * replicas])


def mixed(optimizer: Any, replicas: int) -> Any:
    first = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3 * replicas)
    second = lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / replicas))
    return lr_scheduler.SequentialLR(optimizer, [first, second], [3 * replicas])


#: Schedules that are the same in steps of the optimizer, whatever the number of replicas.
SCHEDULES: dict[str, Callable[[Any, int], Any]] = {
    "function": lambda optimizer, replicas: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / replicas)),
    "cosine": lambda optimizer, replicas: lr_scheduler.CosineAnnealingLR(optimizer, T_max=12 * replicas),
    "warmed": warmed,
    "mixed": mixed,
}


def fresh(**settings: Any) -> Any:
    """An Accelerator of a process in which no other was made."""
    from accelerate.state import AcceleratorState, GradientState

    from shardcore_trainer.accelerate import Accelerator

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(**settings)


def prepared(
    mesh: dict[str, Any] | None, accelerator: Any, rows: int = 16, schedule: str = "function", **more: Any
) -> tuple[Any, ...]:
    """What Accelerate makes of a model, its optimizer, a shuffled loader and a schedule."""
    model = shardcore.shard(llama(), **mesh, **more) if mesh else llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    # Every replica steps it once, as Accelerate has it for processes.
    replicas = mesh.get("dp", 1) if mesh else 1
    scheduler = SCHEDULES[schedule](optimizer, replicas)
    loader = DataLoader(words(rows), batch_size=4 // replicas, shuffle=True, generator=torch.Generator().manual_seed(3))
    return accelerator.prepare(model, optimizer, loader, scheduler)


def loop(accelerator: Any, model: Any, optimizer: Any, loader: Any, scheduler: Any) -> list[tuple[float, float, float]]:
    """Accelerate's own example: one pass, with accumulation, clipping and a schedule."""
    said = []
    for batch in loader:
        with accelerator.accumulate(model):
            # A mean over the labels of a replica would be an average of averages; every row has as many here.
            loss = model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.3) if accelerator.sync_gradients else 0.0
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        mean = accelerator.gather_for_metrics(loss.detach().repeat(len(batch["input_ids"]))).mean()
        said.append((float(mean), float(norm), scheduler.get_last_lr()[0]))
    return said
