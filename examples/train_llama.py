"""Train a byte-level Llama over two ranks next to the same training unsharded, and check that they are the same.

    torchrun --standalone --nproc-per-node 2 examples/train_llama.py

Both start from the same weights and see the same batches of real English: the prose of Python's own manual, which every
Python carries in `pydoc_data.topics`. Then the sharded model is saved, loaded by a process that knows nothing of
shardcore, and all of them continue a text that none has seen. If anything differs, every rank exits with an error.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import click
import torch
import torch.distributed as dist
from _text import Text
from generate_plain import generate
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import shardcore

STEPS, BATCH, LENGTH = 200, 4, 64  # optimizer steps; sequences in a batch; bytes in a sequence
NEW_BYTES = 120  # to generate
CONFIG = LlamaConfig(  # 4.8 million parameters
    vocab_size=256,
    hidden_size=384,
    intermediate_size=1024,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    attention_dropout=0.0,  # two models would have to draw the same masks
    bos_token_id=None,
    eos_token_id=None,
)

# How close the two have to stay: the loss of every step (nats per byte), the gradient of every parameter (relative to
# its size; every ten steps) and every parameter at the end. Both models are float64 and differ in the order of their
# sums only, 1e-16. But transformers computes norms and the loss in float32 whatever the dtype: sooner or later a value
# that differs in its last bit is rounded to another float32, 6e-8 away, and the training goes on from there. At this
# learning rate that stays at a few 1e-6 (at four times the rate, training is chaotic: 1e-4 after 60 steps).
BOUND = 1e-4
REASON = (
    f"Why {BOUND:.0e}: sums in another order differ by 1e-16, and by 6e-8 once transformers, which computes norms and "
    "the loss in float32, rounds them differently; 200 steps carry that to 2e-6. In 8 steps one all-reduce left out of "
    "one layer's backward moves a gradient by 0.7 of its size and the loss by 0.02, a dropout of 1 % the loss by 0.004."
)


# --- training ---


@dataclass
class Training:
    """A model with its optimizer and schedule, and what was measured; the same code with and without shards."""

    model: LlamaForCausalLM
    steps: int
    losses: list[float] = field(default_factory=list)  # nats per byte
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4, betas=(0.9, 0.95), weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate)

    def _rate(self, step: int) -> float:
        """Warm up over a tenth of the steps, then follow half a cosine down to a twentieth."""
        warm_up = min(1.0, (step + 1) / max(1, self.steps // 10))
        return warm_up * (0.525 + 0.475 * math.cos(math.pi * step / self.steps))

    def step(self, batch: Tensor) -> None:
        """Learn from one batch; its gradients stay until the next."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.model(input_ids=batch, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.item())
        self.seconds += time.perf_counter() - start

    @torch.no_grad()
    def judge(self, text: Text) -> float:
        """Return the loss on held-out text."""
        ids = text.held_out[: 32 * LENGTH].view(32, LENGTH)
        return float(self.model(input_ids=ids, labels=ids).loss)


def whole(tensor: Tensor) -> Tensor:
    """Put a tensor together that is split over the ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gradient_distance(sharded: LlamaForCausalLM, plain: LlamaForCausalLM) -> float:
    """Return how far apart gradients are, relative to each one's size: AdamW hides a wrong scale from the losses."""
    pairs = zip(sharded.parameters(), plain.parameters(), strict=True)
    return largest([((whole(a.grad) - b.grad).norm() / b.grad.norm()).item() for a, b in pairs])


def train(sharded: Training, plain: Training, text: Text, seed: int, console: Console) -> float:
    """Take every step with both models and print both curves; return the largest distance of gradients."""
    generator = torch.Generator().manual_seed(seed)
    columns = (TextColumn("training"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    distances = []
    console.print("step    sharded  unsharded  difference  gradients  tokens/s of both", style="bold")
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        for step in progress.track(range(1, sharded.steps + 1)):
            batch = text.batch(BATCH, LENGTH, generator)
            sharded.step(batch)
            plain.step(batch)
            if step == 1 or step % 10 == 0 or step == sharded.steps:
                distances.append(gradient_distance(sharded.model, plain.model))
                a, b = sharded.losses[-1], plain.losses[-1]
                speeds = "".join(f"{step * batch.numel() / each.seconds:9.0f}" for each in (sharded, plain))
                console.print(f"{step:4} {a:10.4f} {b:10.4f}  {abs(a - b):10.1e}  {distances[-1]:9.1e} {speeds}")
    for name, training in (("sharded  ", sharded), ("unsharded", plain)):
        console.print(f"{name} {sparkline(training.losses)}")
    return largest(distances)


def sparkline(values: list[float], width: int = 60) -> str:
    """Draw a curve in one line; each sign is the mean of its share of the values."""
    values = [value for value in values if math.isfinite(value)] or [0.0]
    width = min(width, len(values))
    edges = [round(i * len(values) / width) for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    return "".join("▁▂▃▄▅▆▇█"[round(7 * (mean - low) / (high - low or 1))] for mean in means)


# --- checks ---


@dataclass(frozen=True)
class Check:
    """Something that has to hold, and what was found."""

    name: str
    found: str
    wanted: str
    holds: bool

    @classmethod
    def within(cls, name: str, difference: float) -> Check:
        """Check that a difference is within the bound; one that is not a number is not."""
        return cls(name, f"{difference:.1e} apart", f"≤ {BOUND:.0e}", difference <= BOUND)

    @classmethod
    def equal(cls, name: str, found: list[int], wanted: list[int]) -> Check:
        """Check that two texts are equal."""
        same = sum(a == b for a, b in zip(found, wanted, strict=False))
        return cls(name, f"{same} equal", f"{NEW_BYTES} equal", found == wanted and same == NEW_BYTES)


def check_training(sharded: Training, plain: Training, text: Text, seed: int, console: Console) -> list[Check]:
    """Train both and compare them; then give the unsharded model the sharded one's weights."""
    before = sharded.judge(text)
    gradients = train(sharded, plain, text, seed, console)
    after, plain_after = sharded.judge(text), plain.judge(text)
    baseline = text.baseline()
    console.print(f"held-out loss: {before:.3f} before, {after:.3f} after; a table of byte pairs: {baseline:.3f}\n")
    goal = baseline if sharded.steps >= STEPS else before  # a short run shows that it works, not what it learns
    weights = {name: whole(tensor) for name, tensor in sharded.model.state_dict().items()}
    distances = [(weights[name] - tensor).abs().max().item() for name, tensor in plain.model.state_dict().items()]
    plain.model.load_state_dict(weights)
    losses = [abs(a - b) for a, b in zip(sharded.losses, plain.losses, strict=True)]
    return [
        Check.within("loss of every step", largest(losses)),
        Check.within("gradient of every parameter, relative", gradients),
        Check.within("every parameter after training", largest(distances)),
        Check.within("held-out loss, sharded and unsharded", abs(after - plain_after)),
        Check("held-out loss after training", f"{after:.3f}", f"< {goal:.3f}", after < goal),
    ]


def largest(values: list[float]) -> float:
    """Return the maximum, and not a number if any value is not (which `max` may pass over)."""
    return torch.tensor(values, dtype=torch.float64).max().item()


def check_saving(sharded: LlamaForCausalLM, plain: LlamaForCausalLM, folder: Path) -> list[Check]:
    """Save the sharded model and compare the files with the unsharded one that holds the same weights."""
    sharded.save_pretrained(folder)
    dist.barrier()
    saved = {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
    original = dict(plain.named_parameters())  # names tied weights once, as the files do
    same = sum(name in original and torch.equal(tensor, original[name]) for name, tensor in saved.items())
    holds = saved.keys() == original.keys() and same == len(original)
    return [Check("saved names, shapes and every bit", f"{same} equal", f"{len(original)} equal", holds)]


def check_text(
    sharded: LlamaForCausalLM, plain: LlamaForCausalLM, text: Text, folder: Path, console: Console
) -> list[Check]:
    """Continue held-out text with the sharded model, an unsharded one and the reloaded one."""
    prompt = text.prompt(LENGTH)
    wanted, found = generate(plain, prompt, NEW_BYTES), generate(sharded, prompt, NEW_BYTES)
    # The other ranks wait here; rank 0's answer is everybody's.
    answer = [generate_elsewhere(folder, prompt) if dist.get_rank() == 0 else []]
    dist.broadcast_object_list(answer)
    console.print(f"{prompt}|{bytes(found).decode(errors='replace')}\n", markup=False, highlight=False)
    return [
        Check.equal("greedy bytes, sharded and unsharded", found, wanted),
        Check.equal("greedy bytes, sharded and reloaded", found, answer[0]),
    ]


def generate_elsewhere(folder: Path, prompt: str) -> list[int]:
    """Continue a prompt in a fresh process that loads the folder without shardcore; nothing if it fails."""
    script = Path(__file__).with_name("generate_plain.py")
    command = [sys.executable, str(script), str(folder), prompt, str(NEW_BYTES)]
    # A process of its own, not a rank: without torchrun's variables.
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False, timeout=120)
    return list(json.loads(done.stdout)) if done.returncode == 0 else []


def report(checks: list[Check], console: Console) -> None:
    """Print the checks, and exit with an error on every rank if one of them fails on any."""
    table = Table("check", "found", "wanted", "")
    for check in checks:
        table.add_row(check.name, check.found, check.wanted, "[green]ok[/]" if check.holds else "[red]FAILED[/]")
    console.print(table, REASON, sep="\n", highlight=False)
    failed = [f"{check.name} (found {check.found}, wanted {check.wanted})" for check in checks if not check.holds]
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everywhere, failed)
    dist.destroy_process_group()
    if any(everywhere):
        lines = [f"  on rank {rank}: {line}" for rank, lines in enumerate(everywhere) for line in lines]
        raise SystemExit(1 if console.quiet else "\n".join(["these checks failed:", *lines]))
    console.print(f"all {len(checks)} checks hold on {len(everywhere)} ranks", style="green")


@contextlib.contextmanager
def shared_folder(path: Path | None) -> Iterator[Path]:
    """Yield the folder on every rank; without one, a temporary folder that rank 0 makes and removes."""
    with contextlib.ExitStack() as stack:
        names = [str(path)]
        if path is None and dist.get_rank() == 0:
            names = [stack.enter_context(tempfile.TemporaryDirectory())]
        dist.broadcast_object_list(names)
        yield Path(names[0])
        dist.barrier()


@click.command(context_settings={"show_default": True})
@click.option("--steps", default=STEPS, type=click.IntRange(min=1), help="Optimizer steps.")
@click.option("--seed", default=0, help="Of the weights and the batches.")
@click.option("--output", type=click.Path(path_type=Path), help="Where to save the model; a temporary folder if unset.")
def main(steps: int, seed: int, output: Path | None) -> None:
    """Train a byte-level Llama over two ranks and unsharded, and check that the two are the same."""
    logging.disable_progress_bar()  # of the files; there is one of our own
    text = Text.read()
    torch.manual_seed(seed)
    plain = LlamaForCausalLM(CONFIG).to(torch.float64)
    sharded = shardcore.shard(copy.deepcopy(plain), tp=2)
    console = Console(quiet=dist.get_rank() != 0)
    console.print(f"{plain.num_parameters():,} parameters, {len(text.train):,} bytes to learn from, {steps} steps")
    checks = check_training(Training(sharded, steps), Training(plain, steps), text, seed, console)
    with shared_folder(output) as folder:
        checks += check_saving(sharded, plain, folder)
        checks += check_text(sharded, plain, text, folder, console)
    report(checks, console)


if __name__ == "__main__":
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    # With gloo, torch 2.13 sometimes aborts while Python winds down after the groups are gone ("terminate called
    # without an active exception", in plain torch too). All is done and checked: nothing is left to wind down.
    sys.stdout.flush()
    os._exit(0)
