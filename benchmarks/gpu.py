"""One rank's share of blocks of Llama 3 8B on one GPU: through shardcore, and as the same modules of that size.

    python benchmarks/gpu.py --help

"Ideal" is transformers' own modules, built with the sizes of one rank of eight: the same kernels, and no machinery. The
other seven ranks are not there: their process group sends nothing, so what is seen is the rank's own work, on the
device and on the host. The optimizer is AdamW, over DTensors here and plain tensors there. Says so and stops where
there is no CUDA.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from memory import shard_alone
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaModel

from shardcore import ShardConfig
from shardcore.mesh.context import ShardContext

RANKS = 8
#: Of one model: what all ranks have, and what is divided among them.
WHOLE = {"hidden_size": 4096, "vocab_size": 128, "head_dim": 128}
DIVIDED = {"intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
TINY = {"hidden_size": 128, "vocab_size": 128, "head_dim": 16}, {**DIVIDED, "intermediate_size": 256}
#: System -> fields of its configuration; None for the modules alone.
SYSTEMS: dict[str, dict[str, bool] | None] = {
    "ideal": None,
    "shardcore": {},
    "shardcore, fused norms": {"enable_fused_normalization": True},
    "shardcore, sequence": {"enable_sequence_parallelism": True},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement: the median and the smallest of the rounds, in milliseconds."""

    system: str
    what: str
    median: float
    least: float
    peak_megabytes: float  # above what was there before


def blocks(fields: dict[str, bool] | None, count: int, device: str, *, tiny: bool) -> Any:
    """Return a model of ``count`` blocks: one rank's share of it, or modules of that size."""
    torch.manual_seed(0)
    whole, divided = TINY if tiny else (WHOLE, DIVIDED)
    if fields is None:
        divided = {name: size // RANKS for name, size in divided.items()}
    more = {"num_hidden_layers": count, "use_cache": False, "attn_implementation": "sdpa"}
    model = LlamaModel(LlamaConfig(**whole, **divided, **more)).to(torch.bfloat16).train()
    if fields is not None:
        wanted = ShardConfig(tensor_parallel_size=RANKS, **fields)
        shard_alone(model, wanted, ShardContext.of(wanted.resolve(RANKS).mesh()))
    return model.to(device)


def timed(call: Callable[[], None], rounds: int, device: str) -> tuple[float, float, float]:
    """Return the median and the smallest milliseconds of a call, and its peak of memory above the start, in MiB."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(3):
        call()
    wait()
    start = torch.cuda.memory_allocated() if device == "cuda" else 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        wait()
        found.append((time.perf_counter() - begin) * 1e3)
    peak = (torch.cuda.max_memory_allocated() - start) / 2**20 if device == "cuda" else float("nan")
    return statistics.median(found), min(found), peak


def step_of(model: nn.Module, tokens: int, device: str) -> Callable[[], None]:
    """Return a forward and a backward with ``tokens`` tokens of one sequence."""
    shape = 1, tokens, model.config.hidden_size
    inputs = torch.randn(shape, dtype=torch.bfloat16, device=device, requires_grad=True)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        out: Tensor = model(inputs_embeds=inputs).last_hidden_state
        out.backward(torch.ones_like(out))

    return step


def rows(system: str, tokens: list[int], rounds: int, count: int, device: str, *, tiny: bool) -> Iterator[Row]:
    """Measure one system: training steps, a decoding step, and the optimizer."""
    model = blocks(SYSTEMS[system], count, device, tiny=tiny)

    def row(what: str, call: Callable[[], None]) -> Row:
        median, least, peak = timed(call, rounds, device)
        return Row(system=system, what=what, median=median, least=least, peak_megabytes=peak)

    for number in tokens:
        yield row(f"training, {number} tokens", step_of(model, number, device))
    if system in ("ideal", "shardcore"):
        for kind in ("foreach", "fused"):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **{kind: True})
            yield row(f"AdamW, {kind}", lambda optimizer=optimizer: optimizer.step() and None)
    one = torch.randn(1, 1, model.config.hidden_size, dtype=torch.bfloat16, device=device)
    with torch.inference_mode():
        yield row("inference, 1 token", lambda: model(inputs_embeds=one) and None)


@click.command(help="Measure one rank's share of blocks of Llama 3 8B in bfloat16 on one GPU.")
@click.option("--tokens", default=[4096, 512, 16], multiple=True, show_default=True, help="Of the one sequence.")
@click.option("--layers", default=4, show_default=True, help="How many blocks.")
@click.option("--rounds", default=30, show_default=True, help="Steps that are timed.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results here.")
@click.option("--cpu", is_flag=True, help="Tiny blocks on the CPU: shows that the script runs, and measures nothing.")
def main(tokens: tuple[int, ...], layers: int, rounds: int, file: Path | None, cpu: bool) -> None:
    """Run it."""
    console = Console()
    if not cpu and not torch.cuda.is_available():
        console.print("skipped: this benchmark needs a CUDA device, and torch sees none")
        return
    device = "cpu" if cpu else "cuda"
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    found = [row for name in SYSTEMS for row in rows(name, list(tokens), rounds, layers, device, tiny=cpu)]
    dist.destroy_process_group()
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, tiny"
    least = {row.what: row.least for row in found if row.system == "ideal"}
    table = Table("what", "system", "ms", "least", "of ideal", "peak, MiB")
    for row in sorted(found, key=lambda row: list(least).index(row.what)):
        numbers = (f"{row.median:.2f}", f"{row.least:.2f}", f"{row.least / least[row.what]:.2f}")
        table.add_row(row.what, row.system, *numbers, f"{row.peak_megabytes:.0f}")
    console.print(f"{name}, torch {torch.__version__}, {layers} blocks, one rank of {RANKS}")
    console.print(table)
    if file is not None:
        file.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": [asdict(r) for r in found]}))


if __name__ == "__main__":
    main()
