"""One rank's share of blocks of models on one GPU: through shardcore, by others, and as modules of that size.

    python benchmarks/gpu.py --help

"Ideal" is transformers' own modules, built with the sizes of rank 0: the same kernels, and no machinery. The other
ranks are not there: their process group sends nothing, so what is seen is the rank's own work, on device and host.
A system that cannot do something has a row with the reason. AdamW steps DTensors of shardcore, and plain tensors of
"ideal". transformers' own tensor parallelism takes a model that is in memory here, by what ``from_pretrained`` calls
before it reads a checkpoint. Says so and stops where there is no CUDA.
"""

from __future__ import annotations

import gc
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import transformers
from gpu_models import FAMILIES, SYSTEMS, model_of
from gpu_steps import Call, Clock, calls_of, graph_calls, optimizer_calls
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

_FIRST = "llama-8b"
_FEW = ("ideal", "shardcore", "shardcore, norms as they are")
_BOTH = ("ideal", "shardcore")
_LIMIT = 170.0  # seconds of the main part


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is measured with one model in memory."""

    model: str
    system: str
    tp: int
    tokens: tuple[int, ...]
    optimizer: torch.dtype | None = None  # of the parameters whose steps are measured, and nothing else
    graphs: bool = False  # decoding with CUDA graphs, and nothing else


@dataclass(kw_only=True)
class Row:
    """One measurement: the median and the smallest of the rounds, in milliseconds, or why there is none."""

    model: str
    system: str
    tp: int
    what: str
    median: float | None = None
    least: float | None = None
    peak_megabytes: float | None = None  # above what was there before
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """How jobs are run."""

    clock: Clock
    layers: int
    tiny: bool
    limit: float  # seconds after which no job begins; 0 for none
    began: float = field(default_factory=time.monotonic)

    def rows(self, job: Job) -> Iterator[Row]:
        """Measure all of a job."""
        named: dict[str, Any] = {"model": job.model, "system": job.system, "tp": job.tp}
        if self.limit and time.monotonic() - self.began > self.limit:
            yield Row(**named, what="all", error=f"not begun: {self.limit:.0f} s are over (--limit)")
            return
        family, system = FAMILIES[job.model], SYSTEMS[job.system]
        device = self.clock.device
        try:
            dtype = job.optimizer or torch.bfloat16
            model = model_of(family, system, self.layers, device, tiny=self.tiny, dtype=dtype)
        except Exception as error:
            yield Row(**named, what="all", error=_in_one_line(error))
            return
        if job.optimizer is not None:
            calls = optimizer_calls(family, model, device)
        else:
            calls = (graph_calls if job.graphs else calls_of)(family, model, job.tokens, self.clock)
        for what, make in calls:
            row = Row(**named, what=what)
            self._measure(row, make)
            yield row

    def _measure(self, row: Row, make: Callable[[], Call]) -> None:
        try:
            row.median, row.least, row.peak_megabytes = self.clock.time(make())
        except Exception as error:
            row.error = _in_one_line(error)

    def run(self, jobs: list[Job], say: Callable[[str], None]) -> list[Row]:
        """Run jobs one after another; each number of ranks has a process group for as long as it is needed."""
        found: list[Row] = []
        for job in jobs:
            if not dist.is_initialized() or dist.get_world_size() != job.tp:
                _leave()
                dist.init_process_group("fake", rank=0, world_size=job.tp, store=FakeStore())
            say(f"{time.monotonic() - self.began:.0f} s: {job.model}, tp {job.tp}, {job.system}")
            found += self.rows(job)
            torch.compiler.reset()
            gc.collect()
            if self.clock.device == "cuda":
                torch.cuda.empty_cache()
        _leave()
        return found


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:200]


def main_jobs(tp: tuple[int, ...], tokens: tuple[int, ...]) -> list[Job]:
    """Return the main part: all systems for one model, and few for the others; what is compiled comes last."""
    jobs, last = [], []
    for size in tp:
        eager = [name for name, system in SYSTEMS.items() if not system.compiled]
        jobs += [Job(model=_FIRST, system=name, tp=size, tokens=tokens) for name in eager]
        for name, family in FAMILIES.items():
            ranks = math.gcd(size, family.heads)  # 20 heads of Whisper go to 4 ranks of 8
            few = [Job(model=name, system=s, tp=ranks, tokens=tokens[-2:-1] or tokens) for s in _FEW]
            jobs += few if name != _FIRST else []
        jobs += _optimizer_jobs(size)
        compiled = [name for name in SYSTEMS if name not in eager]
        last += [Job(model=_FIRST, system=s, tp=size, tokens=tokens[-1:], graphs=True) for s in _BOTH]
        last += [Job(model=_FIRST, system=name, tp=size, tokens=tokens[-1:]) for name in compiled]
    return jobs + last


def all_jobs(tp: tuple[int, ...], tokens: tuple[int, ...]) -> list[Job]:
    """Return everything."""
    jobs = []
    for size in tp:
        for model, family in FAMILIES.items():
            jobs += [Job(model=model, system=s, tp=size, tokens=tokens) for s in SYSTEMS]
            graphs = [Job(model=model, system=s, tp=size, tokens=tokens, graphs=True) for s in _BOTH]
            jobs += graphs if family.causal else []
        jobs += _optimizer_jobs(size)
    return jobs


def _optimizer_jobs(tp: int) -> list[Job]:
    kinds = (torch.float32, torch.bfloat16)
    return [Job(model=_FIRST, system=s, tp=tp, tokens=(), optimizer=kind) for kind in kinds for s in _BOTH]


def show(rows: list[Row], console: Console) -> None:
    """Print what was found, each measurement beside that of "ideal"."""
    least = {(row.model, row.tp, row.what): row.least for row in rows if row.system == "ideal"}
    table = Table("model", "tp", "what", "system", "ms", "least", "of ideal", "peak, MiB", "why not")
    order = {name: number for number, name in enumerate(FAMILIES)}
    first = {(row.model, row.tp, row.what): number for number, row in reversed(list(enumerate(rows)))}
    for row in sorted(rows, key=lambda row: (order[row.model], row.tp, first[row.model, row.tp, row.what])):
        numbers: tuple[str, ...] = ("", "", "", "", row.error)
        if row.least is not None:
            ideal = least.get((row.model, row.tp, row.what))
            share = f"{row.least / ideal:.2f}" if ideal else ""
            numbers = (f"{row.median:.2f}", f"{row.least:.2f}", share, f"{row.peak_megabytes:.0f}")
        table.add_row(row.model, str(row.tp), row.what, row.system, *numbers)
    console.print(table)


def _chosen(part: str, given: dict[str, tuple[Any, ...]], *, tiny: bool) -> list[Job]:
    """Return the jobs of a part, as far as the options let them."""
    tokens = given["tokens"] or ((4, 8) if tiny else (16, 512, 4096))
    jobs = main_jobs(given["tp"] or (8,), tokens) if part == "main" else all_jobs(given["tp"] or (2, 4, 8), tokens)
    models, systems = given["models"] or tuple(FAMILIES), given["systems"] or tuple(SYSTEMS)
    asked = [job for job in jobs if job.model in models and job.system in systems and not (tiny and job.graphs)]
    return [job for job in asked if SYSTEMS[job.system].serves(FAMILIES[job.model])]


@click.command(help="Measure one rank's share of blocks of models in bfloat16 on one GPU.")
@click.option("--part", default="main", type=click.Choice(("main", "all")), show_default=True, help="What is measured.")
@click.option("--models", multiple=True, type=click.Choice(tuple(FAMILIES)), help="Only this one; may be repeated.")
@click.option("--systems", multiple=True, type=click.Choice(tuple(SYSTEMS)), help="Only this one; may be repeated.")
@click.option("--tp", multiple=True, type=int, help="Ranks; may be repeated (main: 8, all: 2, 4 and 8).")
@click.option("--tokens", multiple=True, type=int, help="Of the sequence; may be repeated (16, 512 and 4096).")
@click.option("--layers", default=4, show_default=True, help="How many blocks.")
@click.option("--rounds", default=20, show_default=True, help="Steps that are timed.")
@click.option("--limit", type=float, help="Seconds after which no model begins; 0 for none (main: 170, all: 0).")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results here.")
@click.option("--cpu", is_flag=True, help="Tiny blocks on the CPU: shows that the script runs, and measures nothing.")
def main(
    part: str, layers: int, rounds: int, limit: float | None, file: Path | None, cpu: bool, **given: tuple[Any, ...]
) -> None:
    """Run it."""
    console, errors = Console(width=160), Console(stderr=True)
    if not cpu and not torch.cuda.is_available():
        console.print("skipped: this benchmark needs a CUDA device, and torch sees none")
        return
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    jobs = _chosen(part, given, tiny=cpu)
    clock = Clock(device="cpu" if cpu else "cuda", rounds=rounds)
    if limit is None:
        limit = _LIMIT if part == "main" else 0.0
    rows = Bench(clock=clock, layers=layers, tiny=cpu, limit=limit).run(
        jobs, lambda text: errors.print(text, style="dim")
    )
    device = "CPU, tiny" if cpu else torch.cuda.get_device_name()
    about = {"device": device, "torch": torch.__version__, "transformers": version("transformers"), "layers": layers}
    console.print(", ".join(f"{name} {value}" for name, value in about.items()))
    show(rows, console)
    if file is not None:
        file.write_text(json.dumps({**about, "rounds": rounds, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
