"""Loading a checkpoint of 3 GB onto the ranks of this machine: memory and time of each way.

    python benchmarks/loading.py --help

Each sample is taken in new processes, one for each rank, and the ways take turns. Results and what was tried:
``benchmarks/README.md``.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click

PARTS, NATIVE_TP, WHOLE, ALONE = "shardcore", "transformers TP", "from_pretrained + shard", "from_pretrained"
WAYS = (PARTS, NATIVE_TP, WHOLE, ALONE)

_MODEL = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 14,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}  # 2.95 GiB in float32; the largest tensor takes 250 MiB
_TINY = {**_MODEL, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 97}
_MIB = 2**20
_LIMIT = 300  # seconds for one sample
_SLACK = 200e6  # bytes above a rank's part and the largest tensor

_HELP = """Measure how a Llama of 3 GB is loaded from several safetensors files.

\b
shardcore shardcore.from_pretrained, every rank reads its parts
TP        transformers' own tensor parallelism (needs accelerate)
+ shard   the native from_pretrained on every rank, and shardcore.shard
alone     the native from_pretrained on every rank, for reference

Peaks are VmHWM above an idle process that has loaded a tiny model in the same
way. A part that lies in one piece of a file stays there until it is looked at,
so the peak is given again after a forward, which looks at all of it.
"""


def write(folder: Path) -> None:
    """Save the random model, and the tiny one, below ``folder``."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    for name, options in (("tiny", _TINY), ("large", _MODEL)):
        if not (folder / name / "config.json").exists():
            LlamaForCausalLM(LlamaConfig(**options)).save_pretrained(folder / name, max_shard_size="600MB")


def load(way: str, folder: Path, world: int) -> Any:
    """Load the model at ``folder`` in one way."""
    from transformers import LlamaForCausalLM

    import shardcore

    if way == PARTS:
        return shardcore.from_pretrained(LlamaForCausalLM, folder, tp=world)
    if way == NATIVE_TP:
        from transformers.distributed import DistributedConfig

        return LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=world))
    model = LlamaForCausalLM.from_pretrained(folder)
    return shardcore.shard(model, tp=world) if way == WHOLE else model


def measure(way: str, folder: Path, *, cold: bool) -> dict[str, Any]:
    """Return what loading took on this rank, in bytes and seconds."""
    import torch
    import torch.distributed as dist
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    load(way, folder / "tiny", world)
    gc.collect()
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    idle = _status("VmRSS"), _status("RssAnon")
    if cold:
        _forget(folder / "large")
    dist.barrier()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    wall, cpu = time.perf_counter(), time.process_time()
    model = load(way, folder / "large", world)
    found = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    dist.barrier()
    found |= {
        "peak": _status("VmHWM") - idle[0],
        "anonymous": _status("RssAnon") - idle[1],
        "major_faults": resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults,
    }
    with torch.no_grad():
        model(input_ids=torch.arange(8)[None])
    found["peak_after_forward"] = _status("VmHWM") - idle[0]
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    found["part"] = sum(p.nbytes for p in parts)
    dist.barrier()
    dist.destroy_process_group()
    return found


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def _forget(folder: Path) -> None:
    """Drop the files from the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def sample(way: str, folder: Path, world: int, *, cold: bool) -> list[dict[str, Any]]:
    """Measure one way in new processes; one result for each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    workers = []
    for rank in range(world):
        env = {
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, __file__, "--folder", str(folder), "--worker", way, *(["--cold"] if cold else [])]
        workers.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        told = [worker.communicate(timeout=_LIMIT) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, (_, errors) in zip(workers, told, strict=True):
        if worker.returncode:
            raise click.ClickException(f"{way} on {world} ranks:\n{errors[-3000:]}")
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def report(results: dict[str, list[list[dict[str, Any]]]], largest: int) -> list[str]:
    """Return the lines of a table: medians over samples of the rank that took most."""
    lines = [
        "| | part, MiB | peak, MiB | anonymous | after a forward | holds | seconds | CPU seconds | major faults |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, samples in results.items():

        def most(key: str, samples: list[list[dict[str, Any]]] = samples) -> float:
            return statistics.median(max(rank[key] for rank in ranks) for ranks in samples)

        holds = most("peak_after_forward") <= most("part") + largest + _SLACK
        memory = [most(key) / _MIB for key in ("part", "peak", "anonymous", "peak_after_forward")]
        cells = [
            *(f"{value:.0f}" for value in memory),
            "yes" if holds else "no",
            f"{most('wall'):.2f}",
            f"{most('cpu'):.2f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {most('major_faults'):.0f} |")
    return lines


@click.command(help=_HELP)
@click.option("--folder", type=click.Path(path_type=Path), help="Where the model is, or is written; kept.")
@click.option("--rounds", default=3, show_default=True, help="Samples of each way.")
@click.option("--ranks", default="2,4", show_default=True, help="Numbers of ranks.")
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), help="Only these.")
@click.option("--worker", type=click.Choice(WAYS), hidden=True)
@click.option("--cold", is_flag=True, help="Drop the files from the page cache first; shardcore's way only.")
def main(folder: Path | None, rounds: int, ranks: str, ways: tuple[str, ...], worker: str | None, cold: bool) -> None:
    """Run the benchmark, or one rank of a sample."""
    if worker is not None and folder is not None:
        click.echo(json.dumps(measure(worker, folder, cold=cold)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        place = folder or Path(temporary)
        write(place)
        wanted = ways or ((PARTS,) if cold else WAYS)
        largest = _MODEL["vocab_size"] * _MODEL["hidden_size"] * 4
        for world in (int(number) for number in ranks.split(",")):
            found: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in wanted}
            for number in range(rounds):
                for way in wanted if number % 2 else wanted[::-1]:
                    found[way].append(sample(way, place, world, cold=cold))
            click.echo(f"\n{world} ranks, load {os.getloadavg()[0]:.1f}, {'cold' if cold else 'warm'} page cache")
            click.echo("\n".join(report(found, largest)))


if __name__ == "__main__":
    main()
