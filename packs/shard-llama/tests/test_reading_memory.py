"""Loading a checkpoint needs room for a rank's part and one tensor."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import transformers
from llama_cases import build
from resident import Peak
from saving_files import ODD

import shardcore

pytestmark = pytest.mark.newest

_MB = 1_000_000
_LARGE = {
    **ODD,
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "vocab_size": 8001,
}
_LARGEST, _SLACK = 8001 * 1024 * 4, 16 * _MB


@pytest.mark.nightly
@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux to measure peaks")
def test_memory(pool, tmp_path):
    for found in pool.run(_memory, str(tmp_path), world=2):
        assert found["model"] > 150 * _MB
        assert found["part"] < 0.52 * found["model"]
        assert found["load"] < found["part"] + _LARGEST + _SLACK, found
        assert found["copy"] < 60 * _MB, found  # 23 MB of columns, from 16 MiB of a file at a time
        # The measure sees a rank that reads the whole model.
        assert found["whole"] > found["part"] + _LARGEST + _SLACK, found


def _memory(folder: str) -> dict[str, int]:
    if dist.get_rank() == 0:
        build(**ODD).float().save_pretrained(f"{folder}/small")
        torch.nn.Module.to(build(**_LARGE), torch.float32).save_pretrained(f"{folder}/large", max_shard_size="1GB")
    dist.barrier()
    shardcore.from_pretrained(transformers.LlamaForCausalLM, f"{folder}/small", tp=2)  # warm-up
    found = {}
    with Peak() as peak:
        with Peak() as copying:
            model = shardcore.from_pretrained(transformers.LlamaForCausalLM, f"{folder}/large", tp=2)
        for parameter in model.parameters():
            parameter.to_local().sum()  # what stays in the file counts when it is looked at
    found["load"], found["copy"] = peak.bytes, copying.bytes
    found["part"] = sum(parameter.to_local().nbytes for parameter in model.parameters())
    del model
    with Peak() as peak:
        model = transformers.LlamaForCausalLM.from_pretrained(f"{folder}/large")
        for parameter in model.parameters():
            parameter.sum()
        found["model"] = sum(parameter.nbytes for parameter in model.parameters())
        shardcore.shard(model, tp=2)
    found["whole"] = peak.bytes
    return found
