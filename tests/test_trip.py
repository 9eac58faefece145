"""How far a call goes through the core: what a debugger has to follow, and what each step costs the host."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore
from shardcore_planner.simulation import simulated_ranks

CORE = f"{Path(shardcore.__file__).parent}/"
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def gone_through(call) -> Counter[str]:
    """Return how many functions a call runs in each file of the core."""
    seen: Counter[str] = Counter()

    def look(frame, event, argument) -> None:
        if event == "call" and (name := frame.f_code.co_filename).startswith(CORE):
            seen[name.removeprefix(CORE)] += 1

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_two_layers_of_llama():
    def shard():
        config = LlamaConfig(vocab_size=128, num_hidden_layers=2, **SIZES)
        models.append(shardcore.shard(LlamaForCausalLM(config), tp=2))

    models = []
    with simulated_ranks(2):
        shard()  # what the first one finds out is kept
        sharding = gone_through(shard)
        model, ids = models.pop(), torch.zeros(2, 8, dtype=torch.long)

        def step():
            model(input_ids=ids, labels=ids)

        step()
        forward = gone_through(step)
    assert len(sharding) <= 60
    assert len(forward) <= 16
    assert forward.total() <= 240
