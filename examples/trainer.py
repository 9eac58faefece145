"""Train a small model on the prose of Python's manual with transformers' Trainer, over all ranks.

    python examples/trainer.py
    torchrun --standalone --nproc-per-node 2 examples/trainer.py --tp 2

One process and two ranks print the same losses. Started again, it goes on from the newest checkpoint, on another number
of ranks too. Needs shard-llama and accelerate; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from _text import Text
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import shardcore
from shardcore_trainer import Trainer  # in place of transformers'

LENGTH = 64  # bytes in a row


def rows(text: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Cut a text into rows that are their own labels."""
    return [{"input_ids": ids, "labels": ids} for ids in text.split(LENGTH) if len(ids) == LENGTH]


def main() -> None:
    """Train, evaluate, save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model; the others are replicas")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", type=Path, default=Path("runs/trainer"))
    options = parser.parse_args()

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4
    )
    model = shardcore.shard(LlamaForCausalLM(config), tp=options.tp)
    arguments = TrainingArguments(
        str(options.output),
        per_device_train_batch_size=8,  # of each replica
        learning_rate=1e-3,
        max_steps=options.steps,
        logging_steps=5,
        save_steps=10,
        disable_tqdm=True,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    text = Text.read()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=rows(text.train), eval_dataset=rows(text.held_out)[:64]
    )
    last = get_last_checkpoint(str(options.output)) if options.output.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    loss = trainer.evaluate()["eval_loss"]  # every rank calls it
    trainer.save_model(str(options.output / "model"))  # and this; one writes
    if trainer.is_world_process_zero():
        print(f"held-out loss: {loss:.4f}")


if __name__ == "__main__":
    main()
