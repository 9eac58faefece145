"""What `shardcore plan` says against a step that was run: memory and bytes sent, on two and on four processes.

    python benchmarks/planning.py

Two numbers are measured on each rank (gloo, CPU):

* the bytes of all tensors that are alive, at most (``shardcore_planner.watch`` on real tensors);
* what torch's allocator has handed out, at most: by the memory events of ``torch.profiler``, which see what kernels
  take and give back inside, too.

The resident memory of a process says less: the C library keeps what earlier steps gave back, so that a step raises it
by half of what it takes, or by nothing.

The first tells whether the trace is right, the second whether tensors are all there is. The peak of a plan is compared
with the second; on CUDA the corresponding number is ``torch.cuda.max_memory_allocated``.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore
from shardcore import ShardConfig
from shardcore_planner import Call, Workload, estimate, simulated_ranks
from shardcore_planner.calls import call_of
from shardcore_planner.step import run_step
from shardcore_planner.watch import Watch, local
from shardcore_planner.workload import Stepper
from shardcore_testing.pool import WorkerPool

#: 50.1 million parameters: 200 MB in float32.
SIZES = {
    "hidden_size": 640,
    "intermediate_size": 1792,
    "num_hidden_layers": 8,
    "num_attention_heads": 10,
    "num_key_value_heads": 10,
    "vocab_size": 8192,
    "use_cache": False,
}
WORK = Workload(batch=4, seq=256, dtype="fp32", device="cpu")
MESHES: dict[str, dict[str, Any]] = {
    "tp 2": {"tp": 2},
    "tp 2, sequence": {"tp": 2, "enable_sequence_parallelism": True},
    "tp 2 x dp_shard 2": {"tp": 2, "dp_shard_size": 2},
    "tp 2 x dp_replicate 2": {"tp": 2, "dp_replicate_size": 2},
}

#: Of the same batch in micro-batches of one sample.
PIPELINES: dict[str, dict[str, Any]] = {
    "pp 2, 1f1b": {"pp": 2, "tp": 1},
    "pp 2, gpipe": {"pp": 2, "tp": 1, "pipeline_schedule": "gpipe"},
    "pp 2, interleaved": {"pp": 2, "tp": 1, "pipeline_schedule": "interleaved"},
    "pp 2, zbv": {"pp": 2, "tp": 1, "pipeline_schedule": "zbv"},
    "pp 2 x tp 2": {"pp": 2, "tp": 2},
    "pp 2 x dp_shard 2": {"pp": 2, "tp": 1, "dp_shard_size": 2},
}

UNITS = ("count", "bytes")

#: Of a Llama of 70 billion parameters.
LARGE = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def measured(fields: dict[str, Any]) -> dict[str, int]:
    """Run steps on this rank, and return what was measured."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    shardcore.shard(model, **fields)
    call, stepper = call_of(model, WORK), Stepper(model, WORK)
    seen = run_step(model, call, stepper, WORK, Watch())
    alive = max(size for key, size in seen.items() if key[0] == "peak" and key[3] == "all")
    resident = sum(seen["held", kind] for kind in ("parameters", "optimizer"))
    return {
        "tensors": alive,
        "allocator": resident + _allocated(lambda: _step(model, call, stepper)),
        "count": sum(size for key, size in seen.items() if key[0] == "sent" and key[-1] == "count"),
        "bytes": sum(size for key, size in seen.items() if key[0] == "sent" and key[-1] == "bytes"),
    }


def measured_pipeline(fields: dict[str, Any]) -> dict[str, int]:
    """Run steps of a pipeline on this rank, and return what was measured."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    shardcore.shard(model, num_microbatches=WORK.batch, **fields)
    stepper, batch = Stepper(model, WORK), dict(call_of(model, WORK).inputs())

    def step() -> None:
        model.train_step(batch)
        stepper.step()

    for _ in range(2):
        step()
    watch = Watch()
    watch.owns("parameters", model.parameters())
    watch.owns("optimizer", stepper.state())
    with watch:
        step()
    sent = {unit: sum(n for key, n in watch.sent.items() if key[1] == "send" and key[3] == unit) for unit in UNITS}
    alive = max(size for key, size in watch.peaks.items() if key[2] == "all")
    resident = sum(p.nbytes for p in map(local, (*model.parameters(), *stepper.state())))
    return {"tensors": alive, "allocator": resident + _allocated(step), **sent}


def _step(model: Any, call: Call, stepper: Stepper) -> None:
    call.loss(call.forward(model, call.inputs())).backward()
    stepper.step()


def _allocated(step: Any) -> int:
    """Return the most bytes that torch's allocator has handed out above those before ``step``."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    most = now = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


def on_meta(sizes: dict[str, Any], **fields: Any) -> Any:
    """Return a Llama on the meta device."""
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**sizes, **fields)).train()


def sharding_time() -> dict[str, float]:
    """Shard a Llama of 70 billion parameters on meta as one of eight ranks, and return the seconds and the bytes."""
    started = time.perf_counter()
    model = on_meta(LARGE).to(torch.bfloat16)
    built = time.perf_counter()
    with simulated_ranks(8):
        shardcore.shard(model, tp=8)
        done = time.perf_counter()
        held = sum(p.to_local().nbytes for p in model.parameters())
    return {"built": built - started, "sharded": done - built, "bytes": held}


def _of_pipeline(pool: WorkerPool, name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Compare the rank of a pipeline that takes most; of what is sent, that along ``pp``."""
    others = fields["tp"] * fields.get("dp_shard_size", 1)
    started = time.perf_counter()
    config = ShardConfig.of(num_microbatches=WORK.batch, **fields)
    plan = estimate(on_meta(SIZES), config, WORK, call_of).pipeline
    took = time.perf_counter() - started
    assert plan is not None  # a pipeline was asked for
    most = max(plan.ranks, key=lambda rank: rank.peak)
    real = pool.run(measured_pipeline, fields, world=2 * others, timeout=300)[most.rank * others]
    along = [traffic for traffic in most.traffic if traffic.axis == "pp"]
    sent = {"planned_count": sum(t.count for t in along), "planned_bytes": sum(t.bytes for t in along)}
    return {"mesh": f"{name}: rank {most.rank}", "seconds": took, "planned": most.peak, **sent, **real}


@click.command()
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results here.")
def main(file: Path | None) -> None:
    """Run it."""
    rows = []
    with WorkerPool(4) as pool:
        for name, fields in PIPELINES.items():
            rows.append(_of_pipeline(pool, name, fields))
        for name, fields in MESHES.items():
            ranks = fields["tp"] * fields.get("dp_shard_size", 1) * fields.get("dp_replicate_size", 1)
            started = time.perf_counter()
            plan = estimate(on_meta(SIZES), ShardConfig.of(**fields), WORK, call_of)
            took = time.perf_counter() - started
            real = pool.run(measured, fields, world=ranks, timeout=300)[0]
            rows.append(
                {
                    "mesh": name,
                    "seconds": took,
                    "planned": plan.peak,
                    "planned_count": sum(t.count for t in plan.traffic),
                    "planned_bytes": sum(t.bytes for t in plan.traffic),
                    **real,
                }
            )
    console = Console(width=120)
    table = Table("mesh", "peak planned, MiB", "tensors", "allocator", "collectives, MiB", "error", "planned in")
    for row in rows:
        off = [f"{row[name] / 2**20:.1f} ({row['planned'] / row[name] - 1:+.1%})" for name in ("tensors", "allocator")]
        sent = f"{row['planned_count']}, {row['planned_bytes'] / 2**20:.1f}"
        wrong = f"{row['planned_count'] - row['count']}, {row['planned_bytes'] - row['bytes']} B"
        table.add_row(
            row["mesh"],
            f"{row['planned'] / 2**20:.1f}",
            *off,
            sent,
            wrong,
            f"{row['seconds']:.1f} s",
        )
    console.print(table)
    large = sharding_time()
    console.print(
        f"70 B Llama on meta, tp 8: built in {large['built']:.1f} s, sharded in {large['sharded']:.1f} s, "
        f"{large['bytes'] / 2**30:.2f} GiB of parameters per rank"
    )
    if file is not None:
        file.write_text(json.dumps({"torch": torch.__version__, "rows": rows, "large": large}, indent=1))


if __name__ == "__main__":
    main()
