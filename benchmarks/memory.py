"""Peak memory of one training step on one rank, computed without one: fake tensors, a process group that sends nothing.

    python benchmarks/memory.py --help

Nothing is allocated, so any model fits and no other load disturbs it. What was tried: ``benchmarks/README.md``.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast

import shard_llama.policy
from shardcore import ShardConfig
from shardcore.apply.changes import prepared
from shardcore.apply.sharder import ModelSharder
from shardcore.mesh.context import ShardContext

#: Of the model whose memory is summed up.
LAYERS = 32

SEQUENCE = {"enable_sequence_parallelism": True}
SPLIT = {"parallel_output": True}
WAYS: dict[str, dict[str, Any] | None] = {
    "unsharded": None,
    "tp": {},
    "tp, split logits": SPLIT,
    "tp, loss in chunks": {**SPLIT, "loss_chunk_size": 1024},
    "tp, sequence": {**SEQUENCE, **SPLIT, "loss_chunk_size": 1024},
    "tp, sequence, gathered again": {**SEQUENCE, **SPLIT, "loss_chunk_size": 1024, "sequence_keep_gathered": False},
}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama and its batch; one row of tokens."""

    tp: int
    tokens: int
    hidden: int
    inner: int
    heads: int
    vocabulary: int
    bytes: int  # of one number

    def formula(self, way: str) -> float:
        """Return the bytes that one layer keeps for its backward on one rank.

        Counted as Korthikanti et al. (2022, section 4, https://arxiv.org/abs/2205.05198) do for GPT: per token and
        hidden feature, two inputs of norms, two normed ones, two inputs of regions; and, split by heads or columns,
        queries, keys, values and the output of attention, twice (as attention keeps it, and as the product does); per
        inner feature gate, its activation, what it gates, and the product. Attention keeps no weights.
        """
        t = 1 if way == "unsharded" else self.tp
        outside, inputs = (4 / t, 2 / t if "again" in way else 2) if "sequence" in way else (4, 2)
        features = self.hidden * (outside + inputs + 5 / t) + 4 * self.inner / t
        return self.tokens * self.bytes * features


def shard_alone(model: Any, config: ShardConfig, context: ShardContext) -> None:
    """Shard as `shardcore.shard` does, without asking other ranks, which are not there."""
    policy = shard_llama.policy.LlamaPolicy
    sharder = ModelSharder(model, policy, config)
    sharder.plan, sharder.context = sharder.compile(), context
    commits = prepared(model, sharder.plan, context)
    sharder.replace_model_class()
    for commit in commits:
        commit()


Shard = Callable[[Any], None]


def model_of(shape: Shape, layers: int, shard: Shard) -> Any:
    """Return the model of rank 0."""
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.inner,
            num_hidden_layers=layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            vocab_size=shape.vocabulary,
            use_cache=False,
            attn_implementation="sdpa",
        )
    )
    shard(model)
    return model.train()


@contextlib.contextmanager
def on_rank_0(shape: Shape, way: str) -> Iterator[Shard]:
    """Be rank 0 of ranks that are not there, with tensors that hold nothing; yields what shards as ``way`` says."""
    fields = WAYS[way]
    tp = 1 if fields is None else shape.tp
    dist.init_process_group("fake", rank=0, world_size=tp, store=FakeStore())
    torch.set_default_dtype({2: torch.bfloat16, 4: torch.float32}[shape.bytes])
    try:
        config = ShardConfig(tensor_parallel_size=tp, **(fields or {}))
        context = ShardContext.of(config.resolve(tp).mesh(), keeps_gathered=config.sequence_keep_gathered)
        with FakeTensorMode():
            yield lambda model: None if tp == 1 else shard_alone(model, config, context)
    finally:
        torch.set_default_dtype(torch.float32)
        dist.destroy_process_group()


def activations(tracker: MemTracker, when: str) -> int:
    """Return the bytes of activations and temporary tensors, at the ``"peak"`` or in the ``"current"`` state."""
    found = 0
    for of_device in tracker.get_tracker_snapshot(when).values():
        found += sum(size for kind, size in of_device.items() if str(kind).rpartition(".")[2] in ("ACT", "TEMP"))
    return found


def kept(shape: Shape, way: str, layers: int) -> int:
    """Return what all layers keep for their backward, in bytes."""
    with on_rank_0(shape, way) as shard:
        body = model_of(shape, layers, shard).model
        ids = torch.zeros(1, shape.tokens, dtype=torch.long)
        tracker = MemTracker()
        tracker.track_external(body, ids)
        with tracker:
            out = body(input_ids=ids)
            found = activations(tracker, "current")
            del out
        return found


def head_and_loss(shape: Shape, way: str) -> int:
    """Return the most bytes that the head and the loss take at once, forward and backward."""
    with on_rank_0(shape, way) as shard:
        model = model_of(shape, 1, shard)
        ids = torch.zeros(1, shape.tokens, dtype=torch.long)
        hidden = torch.empty(1, shape.tokens, shape.hidden, requires_grad=True)
        model.model.forward = lambda **_: BaseModelOutputWithPast(last_hidden_state=hidden)
        tracker = MemTracker()
        tracker.track_external(model, ids, hidden)
        with tracker:
            model(input_ids=ids, labels=ids).loss.backward()
        return activations(tracker, "peak")


@click.command(
    help="Compute the memory of a training step of a Llama on one rank: activations, not parameters and gradients."
)
@click.option("--tp", default=2, show_default=True, help="Tensor-parallel ranks.")
@click.option("--tokens", default=8192, show_default=True, help="Tokens of the one sequence.")
@click.option("--hidden", default=4096, show_default=True, help="Hidden features.")
@click.option("--inner", default=14336, show_default=True, help="Features of the MLP.")
@click.option("--heads", default=32, show_default=True, help="Attention heads.")
@click.option("--vocabulary", default=128256, show_default=True, help="Words.")
@click.option("--json", "file", type=click.Path(dir_okay=False, path_type=Path), help="Also write the results here.")
def main(file: Path | None, **sizes: int) -> None:
    """Run it."""
    shape = Shape(bytes=2, **sizes)
    console = Console(width=120)
    rows = []
    for way in track(WAYS, "computing", console=Console(stderr=True), transient=True):
        one, two = (kept(shape, way, layers) for layers in (1, 2))
        layer, formula = two - one, shape.formula(way)
        rows.append({"way": way, "head": head_and_loss(shape, way), "layer": layer, "formula": formula})
    names = ("way", "head and loss, MiB", "of gathered", "a layer keeps, MiB", "formula, MiB", "ratio")
    table = Table(*names, f"{LAYERS} layers and head, MiB")
    for row in rows:
        head, layer, formula = (row[name] / 2**20 for name in ("head", "layer", "formula"))
        share, ratio = f"{row['head'] / rows[1]['head']:.2f}", f"{layer / formula:.2f}"
        table.add_row(
            row["way"], f"{head:.0f}", share, f"{layer:.0f}", f"{formula:.0f}", ratio, f"{LAYERS * layer + head:.0f}"
        )
    console.print(table)
    if file is not None:
        file.write_text(json.dumps({"shape": asdict(shape), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
