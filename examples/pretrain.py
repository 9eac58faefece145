"""Train a Llama from nothing, on text that every Python carries: its manual, as bytes.

    python examples/pretrain.py                                                        one process
    torchrun --standalone --nproc-per-node 4 examples/pretrain.py --tp 2               tp 2 x dp 2
    torchrun --standalone --nproc-per-node 4 examples/pretrain.py --config mine.toml --steps 500

Started again it goes on from the newest checkpoint below --output, on another number of ranks too. On SIGTERM it saves
and ends. `examples/launch` has files for several hosts and for SLURM.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

import torch
from _settings import option, read
from _text import Text
from _training import (
    Log,
    adamw,
    computing_in,
    endlessly,
    export,
    leave,
    mean_over_ranks,
    memory,
    replicas_of,
    resume,
    save,
    say,
    warm_up_then_cosine,
    whole,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore
from shardcore_loop import Preemption, ShardedDataLoader


@dataclass(frozen=True)
class Settings:
    """What can be set on the command line and in a file."""

    output: str = option("runs/pretrain", "folder of checkpoints, the log and the trained model")
    # The model.
    hidden: int = option(256, "width")
    layers: int = option(4, "number of blocks")
    heads: int = option(8, "query heads")
    kv_heads: int = option(4, "key-value heads")
    length: int = option(128, "bytes in a sequence")
    # The ranks: each model over --tp of them, as many replicas as the others make.
    tp: int = option(1, "tensor-parallel ranks; has to divide the number of all ranks")
    sp: bool = option(False, "split tokens over the tensor-parallel ranks between blocks")
    # The training.
    steps: int = option(200, "optimizer steps")
    batch: int = option(16, "sequences in a step, over all replicas")
    micro_batch: int = option(8, "sequences at a time on a rank; the rest of its share is accumulated")
    lr: float = option(1e-3, "peak of the learning rate")
    warm_up: int = option(20, "steps until the peak")
    weight_decay: float = option(0.1, "of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    precision: str = option("float32", "float32, float64, or bfloat16: float32 weights, computed with in bfloat16")
    seed: int = option(0, "of the weights and the order of the data")
    # What is seen of it, and what stays.
    log_every: int = option(10, "steps between two lines of the log")
    evaluate_every: int = option(50, "steps between two evaluations")
    save_every: int = option(50, "steps between two checkpoints")
    keep: int = option(2, "checkpoints that are kept")


class Windows(Dataset[Tensor]):
    """Text as sequences of equal length, one after the other."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.rows = text[: len(text) // length * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def build(settings: Settings) -> LlamaForCausalLM:
    """Return the sharded model, which no rank ever holds as a whole; bytes are its vocabulary."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=settings.hidden,
        intermediate_size=settings.hidden * 8 // 3 // 32 * 32,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        max_position_embeddings=max(512, settings.length),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.double() if settings.precision == "float64" else model
    model = shardcore.shard(model, tp=settings.tp, enable_sequence_parallelism=settings.sp)
    return shardcore.initialize(model, seed=settings.seed)  # the same values on any mesh


def learn(model: nn.Module, optimizer: Optimizer, batch: Tensor, settings: Settings) -> tuple[Tensor, Tensor]:
    """Take one step; return the mean loss of this replica's share of the batch, and the norm of the gradient."""
    parts = batch.split(settings.micro_batch)
    total = torch.zeros((), device=batch.device)
    for number, part in enumerate(parts, start=1):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(number == len(parts))  # the replicas need only the sum
        with computing_in(settings.precision, batch.device):
            loss = model(input_ids=part, labels=part).loss / len(parts)
        loss.backward()
        total = total + loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Tensor], settings: Settings, device: torch.device) -> float:
    """Return the mean loss on text that is not learnt from, in nats per byte."""
    model.eval()
    total, count = torch.zeros((), device=device), 0
    for batch in loader:
        rows = batch.to(device)
        with computing_in(settings.precision, device):
            total = total + model(input_ids=rows, labels=rows).loss * len(rows)
        count += len(rows)
    model.train()
    return mean_over_ranks(total, count)


def main() -> None:
    """Train until all steps are taken, or until the job is told to stop."""
    settings = read(Settings, __doc__)
    output = Path(settings.output)
    checkpoints = output / "checkpoints"

    # 1. The ranks, the model on them, and the data of each replica.
    model, replicas = build(settings), replicas_of(settings.tp)
    if settings.batch % replicas:
        raise SystemExit(f"--batch {settings.batch} does not divide by {replicas} replicas")
    device = next(model.parameters()).device
    text, share = Text.read(), settings.batch // replicas
    data = Windows(text.train, settings.length)
    loader = ShardedDataLoader.of(model, data, batch_size=share, shuffle=True, seed=settings.seed, drop_last=True)
    windows = Windows(text.held_out, settings.length)
    held_out = ShardedDataLoader.of(model, windows, batch_size=share, drop_last=True)

    # 2. The optimizer, made after the model is sharded, and the schedule.
    optimizer = adamw(model, settings.lr, settings.weight_decay)
    schedule = warm_up_then_cosine(optimizer, settings.warm_up, settings.steps)

    # 3. Where an earlier run of this job was: weights, optimizer, schedule, random numbers, position in the data.
    step = resume(checkpoints, model, optimizer, schedule=schedule, loader=loader)
    count = sum(p.numel() for p in model.parameters())
    say(f"{count:,} parameters, {len(data):,} sequences, {replicas} replicas x tp {settings.tp}, from step {step}")

    # 4. The steps.
    log, batches = Log(output, step), endlessly(loader)
    with Preemption(signals=(signal.SIGTERM, signal.SIGUSR1)) as preemption:
        while step < settings.steps:
            with log.timed():
                loss, norm = learn(model, optimizer, next(batches).to(device), settings)
                schedule.step()
            step += 1
            if step % settings.log_every == 0:
                log.write(
                    step,
                    loss=mean_over_ranks(loss, 1),
                    gradient_norm=whole(norm),
                    lr=schedule.get_last_lr()[0],
                    bytes_per_second=log.speed(settings.log_every * settings.batch * settings.length),
                    memory=memory(device),
                )
            if step % settings.evaluate_every == 0:
                log.write(step, held_out_loss=evaluate(model, held_out, settings, device))
            stop = preemption.requested()  # on every rank after every step
            if stop or step % settings.save_every == 0 or step == settings.steps:
                save(
                    checkpoints,
                    model,
                    optimizer,
                    schedule=schedule,
                    loader=loader,
                    step=step,
                    settings=settings,
                    wait=stop,
                )
            if stop:
                say(f"saved after step {step} because of {preemption.reason}; start again to go on")
                return

    # 5. A standard checkpoint, which transformers reads without shardcore.
    export(model, output / "model")


if __name__ == "__main__":
    main()
    leave()
