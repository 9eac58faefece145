"""Pipelines on two ranks of this machine: shardcore against stages written by hand, and against the bubble.

    python benchmarks/pipeline.py --help

All systems run in one process group and take turns. Results and what was tried: ``benchmarks/README.md``.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from stages import MICRO_BATCHES, SCHEDULES, SIZES, System, by_hand, sent_bytes, through_shardcore, unsharded
from systems import llama
from tensor_parallel import header, on_two_ranks, table

from shardcore_testing.observing import Collectives

UNSHARDED = "unsharded"
SHARDCORE, HAND, BARE = "shardcore", "by hand", "by hand, bare layers"

_CLOSE = 1e-4  # of the largest gradient, in float32

_HELP = """Measure a step (forward and backward of 8 micro-batches) of one Llama in
a pipeline of two gloo ranks of this machine, one thread each.

\b
shardcore             shard(model, pp=2) and train_step
by hand               PipelineStage of torch around parts of the same model,
                      each of which calls the forward of transformers
by hand, bare layers  the same without it: layers alone, no masks, rotary
                      embeddings computed beforehand
unsharded             one micro-batch after the other, while both ranks do so

"Of expected" is the time of the step in that of half the unsharded one and its
bubble. Bytes and messages are counted on both ranks, and compared with what
has to cross; gradients are compared with the unsharded ones before anything is
timed. Ratios are medians of those turn by turn; CPU time is that of all
threads of both ranks, which other load disturbs less.

Step times mean nothing on a busy machine: look at the load in the header.

\b
Examples:
  python benchmarks/pipeline.py --json results.json
  python benchmarks/pipeline.py --schedule 1f1b --rounds 3
"""  # \b tells click to leave the lines of a paragraph alone


@dataclass
class Result:
    """One system on one rank: seconds of a step by round, and what the rank sends in one.

    Attributes:
        seconds: from a barrier to the next one.
        cpu: of all threads.
        sends: bytes of each message to another rank.
        collectives: calls that are none of these.
        error: the largest difference of a gradient from the unsharded one, of the largest one.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    sends: list[int] = field(default_factory=list)
    collectives: int = 0
    error: float = 0.0


def measure(size: str, schedules: list[str], rounds: int, say: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Time every system on this rank, in turns."""
    of = SIZES[size]
    native = llama(**of.shape).train()
    torch.manual_seed(1)
    ids = torch.randint(0, of.shape["vocab_size"], (MICRO_BATCHES * of.rows, of.tokens))
    systems: dict[str, System] = {UNSHARDED: unsharded(native, ids)}
    for schedule in schedules:
        systems[f"{schedule}: {SHARDCORE}"] = through_shardcore(of, schedule, ids)
        systems[f"{schedule}: {HAND}"] = by_hand(of, schedule, ids, native)
        systems[f"{schedule}: {BARE}"] = by_hand(of, schedule, ids, native, bare=True)
    wanted = _gradients(systems[UNSHARDED])
    results = {name: _checked(name, system, wanted) for name, system in systems.items()}
    gc.disable()
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        names = sorted(systems, key=list(systems).index, reverse=bool(number % 2))
        for name in names:
            _timed(systems[name], results[name])
        gc.collect()
    gc.enable()
    return {name: asdict(result) for name, result in results.items()}


def _timed(system: System, result: Result) -> None:
    system.model.zero_grad(set_to_none=True)
    dist.barrier()
    cpu, start = time.process_time(), time.perf_counter()
    system.step()
    result.cpu.append(time.process_time() - cpu)
    dist.barrier()  # both ranks have finished: the slower one counts
    result.seconds.append(time.perf_counter() - start)


def _gradients(system: System) -> dict[str, torch.Tensor]:
    system.model.zero_grad(set_to_none=True)
    system.step()
    return system.gradients()


def _checked(name: str, system: System, wanted: dict[str, torch.Tensor]) -> Result:
    """Compare the gradients of a step with those of the unsharded model, and count what a further one sends."""
    found = _gradients(system)
    largest = max(float(grad.abs().max()) for grad in wanted.values())
    errors = torch.stack([(grad - wanted[key]).abs().max() for key, grad in found.items()])
    error = float(errors.max()) / largest  # torch's maximum does not pass over NaN
    counts = torch.tensor(len(found))
    dist.all_reduce(counts)
    copies = 2 if name == UNSHARDED else 1
    if not error <= _CLOSE or counts.item() != copies * len(wanted):
        raise SystemExit(f"{name} computes {counts.item()} gradients of {len(wanted)}, with an error of {error}")
    with Collectives() as traffic:
        system.step()
    calls = list(zip(traffic.names, traffic.bytes, strict=True))
    sends = [size for call, size in calls if call.startswith("c10d::send")]
    others = [call for call, _ in calls if "send" not in call and "recv" not in call]
    return Result(sends=sends, collectives=len(others), error=error)


def ratio(one: list[float], other: list[float]) -> float:
    """Return the median over the rounds of how much longer one takes than another."""
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def both(ranks: list[dict[str, Any]], name: str, key: str) -> list[float]:
    """Return the sum over the ranks, by round."""
    return [sum(values) for values in zip(*(rank[name][key] for rank in ranks), strict=True)]


def step_table(size: str, ranks: list[dict[str, Any]]) -> Table:
    """Step time and traffic of every system, from the results of each rank."""
    of = SIZES[size]
    layers = of.shape["num_hidden_layers"]
    title = (
        f"{size}: hidden {of.shape['hidden_size']}, {layers} layers, {MICRO_BATCHES} micro-batches of "
        f"{of.rows} x {of.tokens} tokens, float32"
    )
    columns = ("median ms", "min ms", "by hand", "CPU by hand", "of expected", "MB sent", "expected", "messages")
    shown = table(title, "system", *columns, "collectives", "error")
    alone = ranks[0][UNSHARDED]["seconds"]
    for name, found in ranks[0].items():
        schedule, _, system = name.partition(": ")
        seconds = found["seconds"]
        row = [f"{statistics.median(seconds) * 1e3:.0f}", f"{min(seconds) * 1e3:.0f}", *[""] * 7]
        if system:
            way, hand = SCHEDULES[schedule], f"{schedule}: {HAND}"
            sends = [size for rank in ranks for size in rank[name]["sends"]]
            row[2] = f"{ratio(seconds, ranks[0][hand]['seconds']):.3f}"
            row[3] = f"{ratio(both(ranks, name, 'cpu'), both(ranks, hand, 'cpu')):.3f}"
            row[4] = f"{ratio(seconds, alone) * 2 / way.longer:.3f}"
            row[5:] = [f"{sum(sends) / 1e6:.3f}", f"{sent_bytes(of, way) / 1e6:.3f}", str(len(sends))]
            row.append(str(found["collectives"]))
        shown.add_row(name, *row, f"{max(rank[name]['error'] for rank in ranks):.0e}")
    return shown


@click.command(help=_HELP, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", default=10, show_default=True, type=click.IntRange(1), help="Turns of every system.")
@click.option("--size", default="main", show_default=True, type=click.Choice(list(SIZES)), help="Of the model.")
@click.option("--schedule", "schedules", multiple=True, type=click.Choice(list(SCHEDULES)), help="All by default.")
@click.option("--json", "target", type=click.Path(dir_okay=False, path_type=Path), help="Also write everything here.")
def main(rounds: int, size: str, schedules: tuple[str, ...], target: Path | None) -> None:
    """Run it and print a table."""
    console = Console(width=150)
    data: dict[str, Any] = {"header": header(rounds), "size": size}
    console.print(", ".join(f"{key} {value}" for key, value in data["header"].items()), highlight=False)
    data["ranks"] = on_two_ranks(measure, size, list(schedules or SCHEDULES), rounds)
    console.print(step_table(size, data["ranks"]))
    if target:
        target.write_text(json.dumps(data, indent=1))
        console.print(f"written: {target}")


if __name__ == "__main__":
    main()
