"""Train, stop, and go on on another number of ranks: the losses are those of a training that nobody stopped.

    torchrun --standalone --nproc-per-node 2 examples/resume.py --tp 2 --until 10
    torchrun --standalone --nproc-per-node 4 examples/resume.py --tp 2 --until 20    # tp 2 x dp 2
    python examples/resume.py                                                        # one process, to the end

Needs shard-llama; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from _text import Text
from torch.optim.lr_scheduler import CosineAnnealingLR
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore
from shardcore_loop import ShardedDataLoader

STEPS, BATCH, LENGTH = 30, 8, 64


def main() -> None:
    """Go on from the newest checkpoint until a step, and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tp", type=int, default=1, help="ranks that share the model; the others are replicas")
    parser.add_argument("--until", type=int, default=STEPS, help="the step to stop after")
    parser.add_argument("--output", type=Path, default=Path("runs/resume"))
    options = parser.parse_args()

    # 1. The model, its optimizer and its data, as if it were the beginning.
    torch.manual_seed(0)  # the same weights on every rank
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = shardcore.shard(LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), tp=options.tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = CosineAnnealingLR(optimizer, STEPS)
    replicas = dist.get_world_size() // options.tp if dist.is_initialized() else 1
    rows = [row for row in Text.read().train.split(LENGTH) if len(row) == LENGTH]
    loader = ShardedDataLoader.of(model, rows, batch_size=BATCH // replicas, shuffle=True, seed=0, drop_last=True)

    # 2. Then what was saved, if there is anything: on any mesh, and the data goes on where it was.
    loaded = shardcore.load_checkpoint(
        options.output, model, optimizer, scheduler=scheduler, loader=loader, missing_ok=True
    )
    done = loaded.step if loaded is not None else 0
    say(f"{done} steps are done; tp {options.tp} x dp {replicas}")

    # 3. The training.
    batches = iter(loader)
    for step in range(done + 1, options.until + 1):
        ids = next(batches).to(model.device)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        mean = loss.detach()
        if dist.is_initialized():
            dist.all_reduce(mean)  # over all ranks: those of a replica say the same
            mean = mean / dist.get_world_size()
        say(f"step {step}: loss {mean.item():.4f}")

    # 4. Every rank writes its part.
    shardcore.save_checkpoint(
        options.output, model, optimizer, scheduler=scheduler, loader=loader, step=options.until, keep_last=2
    )
    say(f"saved step {options.until} in {options.output}")


def say(text: str) -> None:
    """Print on one rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
