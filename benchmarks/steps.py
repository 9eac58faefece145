"""Training steps of every system in alternating rounds, and what each sends."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from systems import BATCHES, COMPILED, SHAPES, STEPS, SYSTEMS, UNSHARDED, compile_layers
from torch import nn

from shardcore_testing.observing import Collectives

__all__ = ["Result", "compare", "expected_collectives", "training_step"]


def expected_collectives(name: str, layers: int) -> int:
    """Return the collectives of one step, derived by hand.

    Every system does two all-reduces forward for each layer (behind attention and MLP), one for the vocabulary-split
    embedding and one all-gather of the logits. Backward, the input gradient of the head is reduced once. In each layer
    shardcore and torch per block reduce one gradient for attention and one for the MLP; transformers' TP and torch per
    linear one for each column linear (q, k, v, gate, up).

    Split logits are not gathered; their loss reduces the maximum and the stacked sums. With a split sequence there are
    four gathers and four scatters for each layer, and the gradient of each norm is reduced: two for each layer, one for
    the last. The embedding is reduced, and the gradient of the first layer's input gathered; what the head multiplies
    is gathered; the loss and the head's input gradient are reduced as before.
    """
    if name.startswith(UNSHARDED):
        return 0
    if "sequence" in name:
        return layers * (8 + 2) + 7
    backward = 2 if name.startswith("shardcore") or name == "torch per block" else 5
    return layers * (2 + backward) + (4 if "split logits" in name else 3)


@dataclass
class Result:
    """One system: seconds for each step by round, and what it sends in a step."""

    seconds: list[float] = field(default_factory=list)
    calls: int = 0
    bytes: int = 0

    @property
    def median(self) -> float:
        """Median over the rounds, in seconds."""
        return statistics.median(self.seconds)

    @property
    def least(self) -> float:
        """Minimum over the rounds, in seconds."""
        return min(self.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def of_json(cls, data: dict[str, Any]) -> Self:
        """Return what `to_json` was made from."""
        return cls(**data)


def training_step(model: nn.Module, ids: torch.Tensor) -> float:
    """Run forward and backward, and return the loss."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


def compare(size: str, rounds: int, folder: str, say: Callable[[str], None]) -> dict[str, Result]:
    """Time every system on this rank, in turns.

    Args:
        size: name of a shape.
        rounds: how often each system has its turn.
        folder: with the unsharded checkpoint.
        say: told what is going on.
    """
    torch.manual_seed(1)
    ids = torch.randint(0, SHAPES[size]["vocab_size"], BATCHES[size])
    models: dict[str, nn.Module] = {}
    results: dict[str, Result] = {}
    losses: dict[str, float] = {}
    for name, make in SYSTEMS.items():
        say(f"{size}: loading {name}")
        model = models[name] = make(folder).train()
        training_step(model, ids)
        with Collectives() as traffic:  # of eager modules: nothing is compiled under such a mode
            training_step(model, ids)
        if name in COMPILED:
            compile_layers(model)
            say(f"{size}: compiling {name}")
        losses[name] = training_step(model, ids)
        results[name] = Result(calls=traffic.count, bytes=sum(traffic.bytes))
    _refuse_wrong(losses)
    gc.disable()
    for number in range(rounds):
        say(f"{size}: round {number + 1} of {rounds}")
        names = list(models)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS[size]):
                training_step(models[name], ids)
            dist.barrier()  # both ranks have finished: the slower one counts
            results[name].seconds.append((time.perf_counter() - start) / STEPS[size])
        gc.collect()
    gc.enable()
    return results


def _refuse_wrong(losses: dict[str, float]) -> None:
    reference = losses[UNSHARDED]
    for name, loss in losses.items():
        if not math.isclose(loss, reference, rel_tol=1e-4):
            raise SystemExit(f"{name} computes another loss: {loss}, unsharded {reference}")
