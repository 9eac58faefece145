"""Training steps on two ranks with each optional fast path, against the same without it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from steps import training_step
from systems import SHAPES, llama

__all__ = ["WITHOUT", "measure_switches"]

WITHOUT = "none"
_BATCH = (4, 128)
_BERT = {
    "hidden_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "vocab_size": 8192,
}
_SWITCHES: dict[str, dict[str, Any]] = {
    WITHOUT: {},
    "enable_fused_normalization": {"enable_fused_normalization": True},
    "enable_jit_fused": {"enable_jit_fused": True},
}


def _bert(dropout: float) -> Any:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config: Any = BertConfig(**_BERT, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return BertForMaskedLM(config)


def _models(name: str) -> dict[str, Any]:
    """Return a sharded model for each switch that changes something."""
    import shard_bert.policy
    import shard_llama.policy
    import shardcore

    if name == "Llama":
        policy, switches = shard_llama.policy.LlamaPolicy, list(_SWITCHES)
    else:  # torch's own norms are fused
        policy, switches = shard_bert.policy.BertPolicy, [WITHOUT, "enable_jit_fused"]
    models = {}
    for switch in switches:
        model = llama(**SHAPES["main"]) if name == "Llama" else _bert(0.1 if "dropout" in name else 0.0)
        fields = {"parallel_output": True, **_SWITCHES[switch]}
        models[switch] = shardcore.shard(model.train(), tp=dist.get_world_size(), policy=policy, **fields)
    return models


def measure_switches(rounds: int, say: Callable[[str], None]) -> dict[str, dict[str, list[float]]]:
    """Return seconds of a step by model and switch, in alternating rounds."""
    found: dict[str, dict[str, list[float]]] = {}
    ids = torch.randint(0, 8192, _BATCH, generator=torch.Generator().manual_seed(1))
    for name in ("Llama", "BERT", "BERT, dropout 0.1"):
        models = _models(name)
        for switch, model in models.items():
            say(f"switches: {name}, {switch}")
            for _ in range(2):
                training_step(model, ids)
        times: dict[str, list[float]] = {switch: [] for switch in models}
        gc.disable()
        for number in range(rounds):
            say(f"switches: {name}, round {number + 1} of {rounds}")
            order = list(models)
            for switch in order[number % len(order) :] + order[: number % len(order)]:
                dist.barrier()
                start = time.perf_counter()
                training_step(models[switch], ids)
                dist.barrier()
                times[switch].append(time.perf_counter() - start)
            gc.collect()
        gc.enable()
        found[name] = times
    return found
