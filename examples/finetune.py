"""Teach a pretrained Llama to tell which package of Python's library a docstring comes from.

    torchrun --standalone --nproc-per-node 2 examples/finetune.py --model runs/pretrain/model --tp 2

The weights are those of a standard checkpoint of a model on bytes, such as `examples/pretrain.py` leaves; the head that
it lacks is initialised as transformers does it. The texts are those of the installed Python: nothing is downloaded.
Started again it goes on from the newest checkpoint below --output, on another number of ranks too. On SIGTERM it saves
and ends. `examples/launch` has files for several hosts and for SLURM.

With a BERT it trains by the engine, `shardcore_shardformer.Booster` (`_engine.py`), whose settings are shown by
`--model-type bert --help`:

    torchrun --standalone --nproc-per-node 2 examples/finetune.py --plugin hybrid_parallel --model_type bert --pp_size 2
"""

from __future__ import annotations

import argparse
import signal
from dataclasses import dataclass
from pathlib import Path

import _engine
import torch
from _docstrings import PACKAGES, docstrings
from _settings import option, read
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
from transformers import LlamaForSequenceClassification

import shardcore
from shardcore_loop import Preemption, ShardedDataLoader

PADDING = 0  # a byte that no text has


@dataclass(frozen=True)
class Settings:
    """What can be set on the command line and in a file."""

    model_type: str = option("llama", "llama; or bert, which has settings of its own")
    model: str = option("runs/pretrain/model", "folder of a standard checkpoint of a model on bytes")
    output: str = option("runs/finetune", "folder of checkpoints, the log and the trained model")
    length: int = option(96, "bytes of a docstring that are looked at")
    dropout: float = option(0.1, "of attention weights")
    # The ranks: each model over --tp of them, as many replicas as the others make.
    tp: int = option(1, "tensor-parallel ranks; has to divide the number of all ranks")
    # The training.
    steps: int = option(300, "optimizer steps")
    batch: int = option(32, "docstrings in a step, over all replicas")
    micro_batch: int = option(16, "docstrings at a time on a rank; the rest of its share is accumulated")
    lr: float = option(5e-4, "peak of the learning rate")
    warm_up: int = option(30, "steps until the peak")
    weight_decay: float = option(0.05, "of matrices")
    clip: float = option(1.0, "largest norm of the gradient")
    precision: str = option("float32", "float32, float64, or bfloat16: float32 weights, computed with in bfloat16")
    seed: int = option(0, "of the head, of dropout and of the order of the data")
    # What is seen of it, and what stays.
    log_every: int = option(10, "steps between two lines of the log")
    evaluate_every: int = option(50, "steps between two evaluations")
    save_every: int = option(50, "steps between two checkpoints")
    keep: int = option(2, "checkpoints that are kept")


# --- data ---


_TOGETHER = 16


class Docstrings(Dataset[dict[str, Tensor]]):
    """Docstrings as padded bytes, every tenth of them for evaluation."""

    def __init__(self, length: int, *, held_out: bool) -> None:
        texts = dict.fromkeys(docstrings())  # each once
        self.length = length
        examples = [text for place, text in enumerate(texts) if (place % 10 == 0) == held_out]
        # Replicas get equally many: with an odd one out, one text would be judged twice on some meshes.
        self.examples = examples[: len(examples) // _TOGETHER * _TOGETHER] if held_out else examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        text, label = self.examples[index]
        ids = text.encode()[: self.length]  # a tokenizer's place
        padded = torch.tensor([*ids, *[PADDING] * (self.length - len(ids))])
        return {"input_ids": padded, "attention_mask": (padded != PADDING).long(), "labels": torch.tensor(label)}


# --- the model and its steps ---


def build(settings: Settings) -> nn.Module:
    """Return the sharded model with the pretrained weights, each rank its part, and a head that is new."""
    model = shardcore.from_pretrained(
        LlamaForSequenceClassification,
        settings.model,
        tp=settings.tp,
        seed=settings.seed,  # of the head
        num_labels=len(PACKAGES),
        pad_token_id=PADDING,
        attention_dropout=settings.dropout,
        dtype=torch.float64 if settings.precision == "float64" else torch.float32,
    )
    shardcore.manual_seed(model, settings.seed)  # of dropout
    return model.train()


def learn(
    model: nn.Module, optimizer: Optimizer, batch: dict[str, Tensor], settings: Settings
) -> tuple[Tensor, Tensor]:
    """Take one step; return the mean loss of this replica's share of the batch, and the norm of the gradient."""
    rows = len(batch["labels"])
    starts = range(0, rows, settings.micro_batch)
    total = torch.zeros((), device=batch["labels"].device)
    for start in starts:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(start == starts[-1])  # the replicas need only the sum
        part = {name: values[start : start + settings.micro_batch] for name, values in batch.items()}
        with computing_in(settings.precision, total.device):
            loss = model(**part).loss * len(part["labels"]) / rows
        loss.backward()
        total = total + loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[dict[str, Tensor]], settings: Settings, device: torch.device
) -> float:
    """Return the share of docstrings, none of them learnt from, of which the package is found."""
    model.eval()
    right, count = torch.zeros((), device=device), 0
    for batch in loader:
        labels = batch.pop("labels").to(device)
        with computing_in(settings.precision, device):
            logits = model(**{name: values.to(device) for name, values in batch.items()}).logits
        right = right + (logits.argmax(-1) == labels).sum()
        count += len(labels)
    model.train()
    return mean_over_ranks(right, count)


# --- the training ---


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
    share = settings.batch // replicas
    data = Docstrings(settings.length, held_out=False)
    loader = ShardedDataLoader.of(model, data, batch_size=share, shuffle=True, seed=settings.seed, drop_last=True)
    held_out = ShardedDataLoader.of(model, Docstrings(settings.length, held_out=True), batch_size=share)

    # 2. The optimizer, made after the model is sharded, and the schedule.
    optimizer = adamw(model, settings.lr, settings.weight_decay)
    schedule = warm_up_then_cosine(optimizer, settings.warm_up, settings.steps)

    # 3. Where an earlier run of this job was: weights, optimizer, schedule, random numbers, position in the data.
    step = resume(checkpoints, model, optimizer, schedule=schedule, loader=loader)
    say(f"{len(data):,} docstrings, {replicas} replicas x tp {settings.tp}, from step {step}")

    # 4. The steps.
    log, batches = Log(output, step), endlessly(loader)
    with Preemption(signals=(signal.SIGTERM, signal.SIGUSR1)) as preemption:
        while step < settings.steps:
            with log.timed():
                batch = {name: values.to(device) for name, values in next(batches).items()}
                loss, norm = learn(model, optimizer, batch, settings)
                schedule.step()
            step += 1
            if step % settings.log_every == 0:
                log.write(
                    step,
                    loss=mean_over_ranks(loss, 1),
                    gradient_norm=whole(norm),
                    lr=schedule.get_last_lr()[0],
                    docstrings_per_second=log.speed(settings.log_every * settings.batch),
                    memory=memory(device),
                )
            if step % settings.evaluate_every == 0:
                log.write(step, accuracy=evaluate(model, held_out, settings, device))
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


def model_type() -> str:
    """Return what is trained, which says what other settings there are."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model-type", "--model_type", default=Settings.model_type, choices=("llama", "bert"))
    return str(parser.parse_known_args()[0].model_type)


if __name__ == "__main__":
    if model_type() == "bert":
        _engine.main(__doc__)
    else:
        main()
    leave()
