"""What sharding itself costs: time and collectives of `shard` on meta, and peak memory of sharding and saving."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from systems import llama

from shardcore_testing.observing import Collectives

__all__ = ["measure_memory", "measure_plan"]

# Llama 3.2 1B, with an output head of its own: 1.50 B parameters.
_ONE_BILLION = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 8192,
    "vocab_size": 128256,
}
_LAYERS = (2, 16)

_MEMORY = {
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "intermediate_size": 2752,
    "vocab_size": 32000,
}
_STATM = Path("/proc/self/statm")
_FILE = 100_000_000  # bytes: `max_shard_size` while saving


def _shard(model: Any) -> Any:
    import shard_llama.policy
    import shardcore

    return shardcore.shard(model, tp=dist.get_world_size(), policy=shard_llama.policy.LlamaPolicy)


def measure_plan(repeats: int, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Compile and apply plans for a Llama on meta; one row for each number of layers, seconds of this rank."""
    import shard_llama.policy
    from shardcore.apply.sharder import ModelSharder
    from shardcore.config import ShardConfig

    rows = []
    for layers in _LAYERS:
        say(f"planning: {layers} layers on meta")

        def make(layers: int = layers) -> Any:
            with torch.device("meta"):
                return llama(**_ONE_BILLION, num_hidden_layers=layers)

        compiling, sharding = [], []
        for _ in range(repeats):
            model = make()
            config = ShardConfig(tensor_parallel_size=dist.get_world_size())
            start = time.perf_counter()
            ModelSharder(model, shard_llama.policy.LlamaPolicy, config).compile()
            compiling.append(time.perf_counter() - start)
            dist.barrier()
            start = time.perf_counter()
            _shard(model)
            sharding.append(time.perf_counter() - start)
        model = make()
        count = sum(p.numel() for p in model.parameters())
        with Collectives() as traffic:
            _shard(model)
        rows.append(
            {
                "layers": layers,
                "parameters": count,
                "compile_seconds": min(compiling),
                "shard_seconds": min(sharding),
                "shard_seconds_first": sharding[0],
                "collectives": traffic.count,
            }
        )
    return rows


class _Peak:
    """The most resident memory of this process above what it held at the start, in bytes."""

    def __enter__(self) -> Self:
        gc.collect()
        self.start = self.most = _resident()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        self.most = max(self.most, _resident())

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.most = max(self.most, _resident())

    @property
    def above(self) -> int:
        """Bytes."""
        return self.most - self.start


def _resident() -> int:
    return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure_memory(say: Callable[[str], None]) -> dict[str, Any]:
    """Shard and save a Llama, and return bytes of this rank."""
    model = llama(**_MEMORY)
    whole = sum(p.nbytes for p in model.parameters())
    say("memory: sharding")
    before = _resident()
    with _Peak() as sharding:
        _shard(model)
        gc.collect()
    after = _resident()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    say("memory: saving")
    with _Peak() as saving:
        model.save_pretrained(folder[0], max_shard_size=_FILE)
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    return {
        "rank": dist.get_rank(),
        "model": whole,
        "largest_parameter": largest,
        "file": _FILE,
        "peak_sharding": sharding.above,
        "change_after_sharding": after - before,
        "peak_saving": saving.above,
    }
