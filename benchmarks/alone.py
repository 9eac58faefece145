"""A training step on one rank: the model as it was against the same after `shardcore.shard` with one rank."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Callable

import torch
from steps import training_step
from systems import BATCHES, SHAPES, STEPS, llama

__all__ = ["cost_of_one_rank", "ratio"]


def cost_of_one_rank(rounds: int, say: Callable[[str], None]) -> dict[str, dict[str, list[float]]]:
    """Return seconds of a step by size and system, in alternating rounds; run in a process of its own."""
    import shard_llama.policy
    import shardcore

    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    for size, shape in SHAPES.items():
        say(f"one rank: {size}")
        native = llama(**shape).train()
        policy = shard_llama.policy.LlamaPolicy
        models = {"unsharded": native, "shardcore, tp 1": shardcore.shard(copy.deepcopy(native), tp=1, policy=policy)}
        ids = torch.randint(0, shape["vocab_size"], BATCHES[size])
        times: dict[str, list[float]] = {name: [] for name in models}
        for model in models.values():
            training_step(model, ids)
        gc.disable()
        for number in range(2 * rounds):
            names = sorted(models, reverse=bool(number % 2))
            for name in names:
                start = time.perf_counter()
                for _ in range(STEPS[size]):
                    training_step(models[name], ids)
                times[name].append((time.perf_counter() - start) / STEPS[size])
        gc.enable()
        found[size] = times
    return found


def ratio(times: dict[str, list[float]]) -> float:
    """Return the median over the rounds of how much longer a step takes through shardcore."""
    before, after = times.values()
    return statistics.median(b / a for a, b in zip(before, after, strict=True))
