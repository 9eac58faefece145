"""Train LoRA adapters of a sharded model, save them in PEFT's own format, and load them in PEFT alone.

    python examples/lora.py
    torchrun --standalone --nproc-per-node 2 examples/lora.py
    torchrun --standalone --nproc-per-node 2 examples/lora.py --model runs/pretrain/model

One process and two ranks print the same losses. The model is a small one of random weights, or a folder that
`pretrain.py` saved. Needs shard-llama and peft; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
import torch.distributed as dist
from _text import Text
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import shardcore


def build(folder: Path | None) -> LlamaForCausalLM:
    """Return the model whose weights stay as they are, the same on every rank."""
    if folder is not None:
        return LlamaForCausalLM.from_pretrained(folder)
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4)
    )


def main() -> None:
    """Attach, shard, train, save, and compare with the adapters in PEFT alone."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", type=Path, help="a folder with a byte-level Llama")
    parser.add_argument("--output", type=Path, default=Path("runs/lora"))
    options = parser.parse_args()

    base = build(options.model)
    torch.manual_seed(1)  # the same adapters on every rank
    settings = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = shardcore.shard(get_peft_model(copy.deepcopy(base), settings))  # over all ranks
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    text, generator = Text.read(), torch.Generator().manual_seed(0)
    for step in range(options.steps):
        ids = text.batch(8, 64, generator).to(model.device)  # the same batch on all ranks
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step}: loss {loss.item():.4f}")

    model.save_pretrained(options.output)  # every rank calls it; one writes
    model.eval()
    with torch.no_grad():
        sharded = model(input_ids=ids).logits
        if dist.is_initialized():
            dist.barrier()  # the writer is done
        alone = PeftModel.from_pretrained(base, options.output).eval()(input_ids=ids.cpu()).logits
    say(f"the saved adapters in PEFT alone: logits differ by {(sharded.cpu() - alone).abs().max():.0e} at most")


def say(text: str) -> None:
    """Print on one rank."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text)


if __name__ == "__main__":
    main()
