"""Tensor parallelism on two ranks of this machine: shardcore against the unsharded model, transformers' TP and torch's.

    python benchmarks/tensor_parallel.py --help

All systems run in one process group and take turns, so that a noisy machine is noisy for all of them. Results and what
was tried: ``benchmarks/README.md``.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import socket
import statistics
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from alone import cost_of_one_rank, ratio
from pairs import PLAIN, Cost, host_costs
from rich.console import Console
from rich.table import Table
from sharding import measure_memory, measure_plan
from steps import Result, compare, expected_collectives
from switches import WITHOUT, measure_switches
from systems import BATCHES, COMPILED, SHAPES, UNSHARDED, UNSHARDED_COMPILED, missing, quiet, save

PARTS = ("steps", "switches", "one", "pair", "plan", "memory")

_errors = Console(stderr=True)

_HELP = """Measure tensor parallelism on two gloo ranks of this machine, one thread each.

\b
steps   one training step (forward, loss, backward) of the same Llama under
        every system, in alternating rounds. T1 is the unsharded step while
        both ranks run it at once, as two cores would without tensor
        parallelism; T2 the sharded step. T1/(2 T2) is 1 if nothing is lost.
switches  the step of a Llama and of a BERT with each optional fast path that
        runs here, against the same without it.
one     the step of an unsharded model on one rank, and the same after
        shard() with tp=1.
pair    CPU time of one column and one row linear on a process group that
        transfers nothing: pure host cost, little disturbed by other load.
plan    time and collectives of shard() on a 1 B Llama on meta.
memory  peak memory of each rank while a 0.6 GB Llama is sharded and saved.

Step times mean nothing on a busy machine: look at the load in the header. A
full run takes eight minutes with 10 rounds.

\b
Examples:
  python benchmarks/tensor_parallel.py --json results.json
  python benchmarks/tensor_parallel.py --only pair
  python benchmarks/tensor_parallel.py --only steps --size main --rounds 3
"""  # \b tells click to leave the lines of a paragraph alone


def _say(text: str) -> None:
    """Tell what is going on, on stderr: tables alone go to stdout."""
    _errors.print(f"[dim]{datetime.datetime.now():%H:%M:%S}  {text}[/dim]", highlight=False)


def _say_nothing(text: str) -> None:
    pass


def _on_rank(rank: int, job: Callable[..., Any], port: int, results: str, arguments: tuple[Any, ...]) -> None:
    """Be one of two ranks with one thread each: run ``job`` and leave what it returns in a file."""
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank)
    )
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300))

    with quiet():
        found = job(*arguments, _say if rank == 0 else _say_nothing)
    Path(results, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(job: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Run ``job(*arguments, say)`` in two new processes and return what it returned on each."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as results:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(_on_rank, (job, port, results, arguments), nprocs=2)  # type: ignore[no-untyped-call]
        return [json.loads(Path(results, f"{rank}.json").read_text()) for rank in range(2)]


def _steps(size: str, rounds: int, folder: str, say: Callable[[str], None]) -> dict[str, Any]:
    if dist.get_rank() == 0:
        save(Path(folder), size)
    dist.barrier()
    return {name: result.to_json() for name, result in compare(size, rounds, folder, say).items()}


def table(title: str, *columns: str) -> Table:
    """Return an empty table whose first column is text and the others numbers."""
    new = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        new.add_column(column, justify="right" if i else "left")
    return new


def step_table(size: str, results: dict[str, Result]) -> Table:
    """Step time and traffic of every system, at one size."""
    (rows, tokens), shape = BATCHES[size], SHAPES[size]
    layers = shape["num_hidden_layers"]
    title = f"{size}: hidden {shape['hidden_size']}, {layers} layers, {rows} x {tokens} tokens, float32"
    shown = table(title, "system", "median ms", "min ms", "T1/(2 T2)", "by min", "collectives", "expected", "MB")
    for name, r in results.items():
        efficiency = ("", "")
        if not name.startswith(UNSHARDED):
            alone = results[UNSHARDED_COMPILED if name in COMPILED else UNSHARDED]
            efficiency = (f"{alone.median / (2 * r.median):.3f}", f"{alone.least / (2 * r.least):.3f}")
        times = (f"{r.median * 1e3:.1f}", f"{r.least * 1e3:.1f}")
        expected = str(expected_collectives(name, layers))
        shown.add_row(name, *times, *efficiency, str(r.calls), expected, f"{r.bytes / 1e6:.1f}")
    return shown


def switch_table(found: dict[str, dict[str, list[float]]]) -> Table:
    """Step time with each switch."""
    shown = table("two ranks, with a switch and without", "model", "switch", "median ms", "of without, by rounds")
    for model, times in found.items():
        for switch, seconds in times.items():
            gain = "" if switch == WITHOUT else f"{Cost.ratio(seconds, times[WITHOUT]):.3f}"
            shown.add_row(model, switch, f"{statistics.median(seconds) * 1e3:.1f}", gain)
    return shown


def one_table(found: dict[str, dict[str, list[float]]]) -> Table:
    """Step time on one rank, at each size."""
    shown = table("one rank", "size", "unsharded ms", "through shard(tp=1) ms", "ratio, by rounds")
    for size, times in found.items():
        shown.add_row(size, *(f"{statistics.median(t) * 1e3:.1f}" for t in times.values()), f"{ratio(times):.3f}")
    return shown


def pair_table(costs: dict[str, Cost]) -> Table:
    """CPU time of a column and row pair."""
    shown = table(
        "a column and row pair, CPU us: forward and backward (train), forward under no_grad (infer)",
        "system", "train median", "train min", "against plain", "infer median", "infer min", "against plain",
    )  # fmt: skip
    plain = costs[PLAIN]
    for name, cost in costs.items():
        training, inference = cost.training, cost.inference
        shown.add_row(
            name,
            *(
                f"{statistics.median(training):.0f}",
                f"{min(training):.0f}",
                f"{Cost.ratio(training, plain.training):.2f}",
            ),
            *(f"{statistics.median(inference):.0f}", f"{min(inference):.0f}"),
            f"{Cost.ratio(inference, plain.inference):.2f}",
        )
    return shown


def plan_table(rows: list[dict[str, Any]]) -> Table:
    """Time to compile and to apply a plan on meta."""
    shown = table(
        "shard() of a Llama on meta, two ranks; it compiles, agrees and applies",
        "layers", "parameters", "compile ms", "shard() ms", "first shard() ms", "collectives",
    )  # fmt: skip
    for row in rows:
        times = [f"{row[key] * 1e3:.0f}" for key in ("compile_seconds", "shard_seconds", "shard_seconds_first")]
        shown.add_row(str(row["layers"]), f"{row['parameters'] / 1e9:.2f} B", *times, str(row["collectives"]))
    return shown


def memory_table(rows: list[dict[str, Any]]) -> Table:
    """Peak memory of each rank."""
    first = rows[0]
    shown = table(
        f"resident memory above the start, MB; the model has {first['model'] / 1e6:.0f}, its largest parameter "
        f"{first['largest_parameter'] / 1e6:.0f}, a file {first['file'] / 1e6:.0f}",
        "rank", "peak while sharding", "change after sharding", "peak while saving",
    )  # fmt: skip
    for row in rows:
        values = (row["peak_sharding"], row["change_after_sharding"], row["peak_saving"])
        shown.add_row(str(row["rank"]), *(f"{value / 1e6:.0f}" for value in values))
    return shown


def header(rounds: int) -> dict[str, Any]:
    """What has to be known to compare two runs."""
    names = ("torch", "transformers", "accelerate", "shardcore", "shard-llama")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "from source"
    return {
        "date": f"{datetime.datetime.now():%Y-%m-%d %H:%M}",
        **versions,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "rounds": rounds,
    }


@click.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--rounds", default=10, show_default=True, type=click.IntRange(1), help="Turns of every system; quote 8 or more."
)
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(SHAPES)), help="A model size; all by default.")
@click.option("--only", "parts", multiple=True, type=click.Choice(PARTS), help="A part; all by default.")
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Also write everything here.")
def main(rounds: int, sizes: tuple[str, ...], parts: tuple[str, ...], target: Path | None) -> None:
    """Run the parts that were asked for and print a table of each."""
    if problem := missing():
        raise click.ClickException(problem)
    # For the processes started below: torch counts the waits that DTensor activations leave out, at their end.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    console = Console(width=120)
    data: dict[str, Any] = {"header": header(rounds)}
    console.print(", ".join(f"{key} {value}" for key, value in data["header"].items()), highlight=False)
    parts = parts or PARTS
    if "steps" in parts:
        for size in sizes or SHAPES:
            with tempfile.TemporaryDirectory() as folder:
                found, _ = on_two_ranks(_steps, size, rounds, folder)
            data[f"steps {size}"] = found
            console.print(step_table(size, {name: Result.of_json(r) for name, r in found.items()}))
    if "switches" in parts:
        data["switches"], _ = on_two_ranks(measure_switches, rounds)
        console.print(switch_table(data["switches"]))
    if "one" in parts:
        with ProcessPoolExecutor(1, mp.get_context("spawn")) as fresh:
            data["one"] = fresh.submit(cost_of_one_rank, rounds, _say).result()
        console.print(one_table(data["one"]))
    if "plan" in parts:
        data["plan"], _ = on_two_ranks(measure_plan, max(3, rounds // 2))
        console.print(plan_table(data["plan"]))
    if "memory" in parts:
        data["memory"] = on_two_ranks(measure_memory)
        console.print(memory_table(data["memory"]))
    if "pair" in parts:
        _say(f"pair: {10 * rounds} turns")
        with ProcessPoolExecutor(1, mp.get_context("spawn")) as fresh:
            costs = fresh.submit(host_costs, rounds).result()
        data["pair"] = {name: {"training": c.training, "inference": c.inference} for name, c in costs.items()}
        console.print(pair_table(costs))
    if target:
        target.write_text(json.dumps(data, indent=1))
        console.print(f"written: {target}")


if __name__ == "__main__":
    main()
