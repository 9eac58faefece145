"""One block of Llama 3 8B on one GPU: native, through shardcore on one rank, and one rank's share of eight.

    python benchmarks/gpu.py --help

The other seven ranks are not there: their process group sends nothing, so what is seen is the rank's own work, on the
device and on the host. Says so and stops where there is no CUDA.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from memory import shard_alone
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaModel

from shardcore import ShardConfig
from shardcore.mesh import ShardContext

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128,
}
TINY = {**SHAPE, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
RANKS = 8


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system: medians over the rounds, of forward and backward."""

    system: str
    attention: str
    milliseconds: float
    host_microseconds: float
    matmul_share: float  # of the time that its matrix products alone take
    peak_megabytes: float


def block(device: str, attention: str, tp: int, *, tiny: bool, sharded: bool) -> Any:
    """Return a model with one block, or one rank's share of it."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **(TINY if tiny else SHAPE), num_hidden_layers=1, use_cache=False, attn_implementation=attention
    )
    model = LlamaModel(config).to(torch.bfloat16).train()
    if sharded and tp > 1:
        wanted = ShardConfig(tensor_parallel_size=tp)
        shard_alone(model, wanted, ShardContext.of(wanted.resolve(tp).mesh()))
    return model.to(device)


def products(tp: int, tokens: int, device: str, *, tiny: bool) -> Callable[[], None]:
    """Return a call that does the matrix products of one block's forward and backward, and nothing else."""
    shape = TINY if tiny else SHAPE
    hidden, inner = shape["hidden_size"], shape["intermediate_size"] // tp
    keys = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"] // tp
    sizes = [(hidden, hidden // tp), (hidden, keys), (hidden, keys), (hidden // tp, hidden)]
    sizes += [(hidden, inner), (hidden, inner), (inner, hidden)]
    operands = [
        tuple(torch.randn(*size, dtype=torch.bfloat16, device=device) for size in ((tokens, n), (n, m), (tokens, m)))
        for n, m in sizes
    ]

    def run() -> None:
        for x, weight, grad in operands:
            x @ weight
            grad @ weight.t()
            x.t() @ grad

    return run


def timed(call: Callable[[], None], device: str, rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of a call, and the microseconds until the host is free again."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        call()
    whole, host = [], []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        wait()
        whole.append(time.perf_counter() - start)
    return statistics.median(whole) * 1e3, statistics.median(host) * 1e6


def measure(system: str, attention: str, device: str, tokens: int, rounds: int, *, tiny: bool) -> Row:
    """Measure one system."""
    tp = RANKS if system.endswith(f"tp {RANKS}") else 1
    model = block(device, attention, tp, tiny=tiny, sharded=system != "native")
    inputs = torch.randn(1, tokens, model.config.hidden_size, dtype=torch.bfloat16, device=device, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out: Tensor = model(inputs_embeds=inputs).last_hidden_state
        out.backward(torch.ones_like(out))

    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    milliseconds, host = timed(step, device, rounds)
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else float("nan")
    bound, _ = timed(products(tp, tokens, device, tiny=tiny), device, rounds)
    return Row(
        system=system,
        attention=attention,
        milliseconds=milliseconds,
        host_microseconds=host,
        matmul_share=bound / milliseconds,
        peak_megabytes=peak,
    )


@click.command(help="Measure one block of Llama 3 8B in bfloat16 on one GPU.")
@click.option("--tokens", default=4096, show_default=True, help="Tokens of the one sequence.")
@click.option("--rounds", default=30, show_default=True, help="Steps that are timed.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results here.")
@click.option("--cpu", is_flag=True, help="A tiny block on the CPU: shows that the script runs, and measures nothing.")
def main(tokens: int, rounds: int, file: Path | None, cpu: bool) -> None:
    """Run it."""
    console = Console()
    if not cpu and not torch.cuda.is_available():
        console.print("skipped: this benchmark needs a CUDA device, and torch sees none")
        return
    device = "cpu" if cpu else "cuda"
    attentions = ["sdpa"] + (
        ["flash_attention_2"] if device == "cuda" and importlib.util.find_spec("flash_attn") else []
    )
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    systems = ("native", "shardcore, tp 1", f"shardcore, one rank of tp {RANKS}")
    rows = [
        measure(system, attention, device, tokens, rounds, tiny=cpu) for attention in attentions for system in systems
    ]
    dist.destroy_process_group()
    table = Table("system", "attention", "ms", "host us", "of products alone", "peak, MiB")
    for row in rows:
        numbers = (f"{row.milliseconds:.3f}", f"{row.host_microseconds:.0f}", f"{row.matmul_share:.2f}")
        table.add_row(row.system, row.attention, *numbers, f"{row.peak_megabytes:.0f}")
    console.print(table)
    if file is not None:
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU, tiny"
        found = {"device": name, "torch": torch.__version__, "tokens": tokens, "rows": [asdict(row) for row in rows]}
        file.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
