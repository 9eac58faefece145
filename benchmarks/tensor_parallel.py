"""Tensor parallelism on two ranks: shardcore against the unsharded model, transformers' own TP and torch's.

    python benchmarks/tensor_parallel.py            # two gloo ranks with one thread each; about five minutes

All systems run in one process group and take turns, round by round, so that a noisy machine is noisy for all of them.
One step is forward, loss and backward of the same batch. T1 is the unsharded step while both ranks run it at once, as
two cores would without tensor parallelism; the efficiency of a system is T1 / (2 * T2).

Column and row pairs are timed as CPU time in one process with the `fake` process group: pure host cost, no transfers.
"""

from __future__ import annotations

import datetime
import gc
import json
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

SIZES: dict[str, dict[str, int]] = {
    "main": {
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "intermediate_size": 2752,
        "vocab_size": 8192,
    },
    "host-bound": {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 256,
    },
}
BATCHES = {"main": (4, 128), "host-bound": (1, 16)}  # (rows, tokens)
STEPS = {"main": 1, "host-bound": 20}  # steps timed together in one round
PORT = "29571"


class Traffic(TorchDispatchMode):
    """Counts collectives and the bytes that they reduce or gather."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operation."""
        name = str(func)
        if name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name:
            self.calls += 1
            tensors = [t for a in args for t in (a if isinstance(a, list | tuple) else [a])]
            flat = [t for item in tensors for t in (item if isinstance(item, list | tuple) else [item])]
            self.bytes += max((t.nbytes for t in flat if isinstance(t, torch.Tensor)), default=0)
        return func(*args, **(kwargs or {}))


@dataclass
class Result:
    """Seconds of one system, by round, and what it sends in one step."""

    seconds: list[float] = field(default_factory=list)
    calls: int = 0
    bytes: int = 0

    @property
    def median(self) -> float:
        """Median over the rounds."""
        return statistics.median(self.seconds)


def build(size: str, folder: str) -> dict[str, nn.Module]:
    """Return the same model under every system."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import shard_llama.policy
    import shardcore

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=False, use_cache=False, attn_implementation="sdpa")
    native = LlamaForCausalLM(config).train()
    if dist.get_rank() == 0:
        native.save_pretrained(folder)
    dist.barrier()
    models = {"unsharded": native}
    models["shardcore"] = shardcore.shard(
        LlamaForCausalLM.from_pretrained(folder), tp=2, policy=shard_llama.policy.LlamaForCausalLMPolicy
    )
    models["transformers TP"] = transformers_tp(folder)
    for name in ("torch per linear", "torch per block"):
        models[name] = torch_tp(LlamaForCausalLM.from_pretrained(folder), per_block=name.endswith("block"))
    return {name: model.train() for name, model in models.items()}


def transformers_tp(folder: str) -> nn.Module:
    """Return the model sharded by transformers itself, while loading."""
    from transformers import DistributedConfig, LlamaForCausalLM

    model: nn.Module = LlamaForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2))
    return model


def torch_tp(model: Any, *, per_block: bool) -> nn.Module:
    """Return the model sharded by torch's `parallelize_module`.

    Args:
        model: an unsharded Llama.
        per_block: activations become DTensors once for each block (`PrepareModuleInput`) instead of in each linear.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for layer in model.model.layers:
        plan: dict[str, Any] = {f"self_attn.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {f"mlp.{name}": ColwiseParallel() for name in ("gate_proj", "up_proj")}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        if per_block:
            entry = {"input_layouts": Replicate(), "desired_input_layouts": Replicate()}
            plan["mlp"] = PrepareModuleInput(**entry)
            plan["self_attn"] = PrepareModuleInput(
                input_kwarg_layouts={"hidden_states": Replicate()},
                desired_input_kwarg_layouts={"hidden_states": Replicate()},
            )
        parallelize_module(layer, mesh, plan)
    parallelize_module(model.lm_head, mesh, ColwiseParallel(output_layouts=Replicate()))
    parallelize_module(model.model.embed_tokens, mesh, RowwiseParallel(input_layouts=Replicate()))
    return model  # type: ignore[no-any-return]  # a transformers model


def step(model: nn.Module, ids: torch.Tensor) -> float:
    """Run forward, loss and backward once, and return the loss."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(loss.detach())


def compare(size: str, rounds: int, folder: str) -> dict[str, Result]:
    """Time every system in alternating rounds."""
    models = build(size, folder)
    torch.manual_seed(1)
    ids = torch.randint(0, SIZES[size]["vocab_size"], BATCHES[size])
    results = {name: Result() for name in models}
    losses: dict[str, float] = {}
    for name, model in models.items():
        losses[name] = step(model, ids)
        with Traffic() as traffic:
            step(model, ids)
        results[name].calls, results[name].bytes = traffic.calls, traffic.bytes
    reference = losses["unsharded"]
    for name, loss in losses.items():
        if abs(loss - reference) > 1e-4 * abs(reference):
            raise SystemExit(f"{name} computes another loss: {loss}, unsharded {reference}")
    gc.disable()
    for number in range(rounds):
        names = list(models)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(STEPS[size]):
                step(models[name], ids)
            dist.barrier()  # both ranks have finished: the slower one counts
            results[name].seconds.append((time.perf_counter() - start) / STEPS[size])
    gc.enable()
    return results


def worker(rank: int, size: str, rounds: int, folder: str) -> None:
    """Be one of the two ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT, RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=300))
    results = compare(size, rounds, folder)
    if rank == 0:
        rows = {n: {"seconds": r.seconds, "calls": r.calls, "bytes": r.bytes} for n, r in results.items()}
        (Path(folder) / "results.json").write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


class Pair(nn.Module):
    """A column and a row linear, small enough that only the host matters."""

    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(16, inner, bias=False)
        self.down = nn.Linear(inner, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., 16)."""
        return self.down(self.up(x))  # type: ignore[no-any-return]  # modules return Any


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class PlainPair(Pair):
    """The pair by hand, on plain local parameters: the least that tensor parallelism can cost."""

    def __init__(self) -> None:
        super().__init__(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (..., 16)."""
        return _Exit.apply(self.down(self.up(_Enter.apply(x))))  # type: ignore[no-any-return,no-untyped-call]


def pairs() -> dict[str, nn.Module]:
    """Return the pair under every system, on a process group that transfers nothing."""
    from shardcore.mesh import ShardContext
    from shardcore.nn import ColumnLinear, Region, RowLinear
    from shardcore.nn.dropout import DropoutSites

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    context = ShardContext.of(mesh)
    ours = Pair()
    ColumnLinear.from_native_module(ours.up, context, enters=False)
    RowLinear.from_native_module(ours.down, context)
    ours.register_forward_pre_hook(Region(context, ("x", 0), [ours.up], DropoutSites([ours])), with_kwargs=True)
    theirs = parallelize_module(Pair(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    plain = PlainPair()
    return {"unsharded": Pair(), "plain local parameters": plain, "shardcore": ours, "DTensor activations": theirs}


def host_cost(rounds: int) -> dict[str, float]:
    """Return the median CPU time of one pair, forward and backward, in microseconds."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.set_num_threads(1)
    x = torch.randn(2, 4, 16, requires_grad=True)

    def run(model: nn.Module, steps: int) -> float:
        start = time.process_time()
        for _ in range(steps):
            model(x).sum().backward()
            model.zero_grad(set_to_none=True)
        return (time.process_time() - start) / steps * 1e6

    models = pairs()
    times: dict[str, list[float]] = {name: [] for name in models}
    for model in models.values():
        run(model, 100)
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(run(model, 200))
    dist.destroy_process_group()
    return {name: statistics.median(values) for name, values in times.items()}


def step_table(size: str, results: dict[str, Result]) -> Table:
    """Return the table of one size."""
    rows, tokens = BATCHES[size]
    shape = SIZES[size]
    title = f"{size}: hidden {shape['hidden_size']}, {shape['num_hidden_layers']} layers, {rows} x {tokens}"
    table = Table(title=title)
    for column in ("system", "median ms", "min ms", "T1 / (2 T2)", "collectives", "MB"):
        table.add_column(column, justify="left" if column == "system" else "right")
    alone = results["unsharded"].median
    for name, r in results.items():
        efficiency = "" if name == "unsharded" else f"{alone / (2 * r.median):.3f}"
        times = (f"{r.median * 1e3:.1f}", f"{min(r.seconds) * 1e3:.1f}")
        table.add_row(name, *times, efficiency, str(r.calls), f"{r.bytes / 1e6:.1f}")
    return table


def measure(size: str, rounds: int) -> dict[str, Result]:
    """Run one size on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(worker, (size, rounds, folder), nprocs=2)  # type: ignore[no-untyped-call]  # untyped in torch
        data = json.loads((Path(folder) / "results.json").read_text())
    return {name: Result(**values) for name, values in data.items()}


@click.command()
@click.option("--rounds", default=10, show_default=True, help="Alternating rounds of every system.")
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(SIZES)), help="Model sizes; all by default.")
def main(rounds: int, sizes: tuple[str, ...]) -> None:
    """Time tensor parallelism on two ranks of this machine."""
    import transformers

    console = Console(width=110)
    console.print(
        f"{datetime.date.today()}, torch {torch.__version__}, transformers {transformers.__version__}, "
        f"Python {platform.python_version()}, {os.cpu_count()} cores, {rounds} rounds"
    )
    for size in sizes or SIZES:
        console.print(step_table(size, measure(size, rounds)))
    table = Table(title="host time of a column and row pair, forward and backward")
    table.add_column("system")
    table.add_column("CPU us", justify="right")
    table.add_column("against plain", justify="right")
    costs = host_cost(rounds)
    for name, cost in costs.items():
        table.add_row(name, f"{cost:.0f}", f"{cost / costs['plain local parameters']:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
