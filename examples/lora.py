"""Fine-tune a Llama from a local folder with LoRA, save the adapter, merge it, load the result in transformers alone.

    python examples/small.py llama runs/llama
    torchrun --standalone --nproc-per-node 2 examples/lora.py --model runs/llama --data runs/llama/texts.txt

`--model` is the folder of any Llama with its tokenizer, `--data` a file with a text in each line. Needs shard-llama,
shardcore-peft and peft.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaForCausalLM

import shardcore
from shardcore_peft import get_peft_model  # in place of PEFT's


def main() -> None:
    """Load, attach, train, save, merge, and look at what was saved."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with a Llama and its tokenizer")
    parser.add_argument("--data", type=Path, required=True, help="a file of texts, one in a line")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights that stay as they are")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="texts in a step")
    parser.add_argument("--length", type=int, default=64, help="tokens of a text that are looked at")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--output", type=Path, default=Path("runs/lora"))
    options = parser.parse_args()

    # 1. Each rank reads its part of the weights. tp is the number of all ranks.
    model = shardcore.from_pretrained(LlamaForCausalLM, options.model, dtype=getattr(torch, options.dtype))
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    # 2. The adapter, in float32 as PEFT makes it. The ranks hold parts of one adapter: that of the first rank.
    torch.manual_seed(0)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.lr)
    say(f"{sum(p.numel() for p in trained):,} of {sum(p.numel() for p in model.parameters()):,} numbers are trained")

    # 3. The training: every rank sees the same batch.
    texts = options.data.read_text(encoding="utf-8").splitlines()
    generator = torch.Generator().manual_seed(0)
    for step in range(options.steps):
        chosen = torch.randint(len(texts), (options.batch,), generator=generator)
        batch = tokenizer(
            [texts[place] for place in chosen],
            padding=True,
            truncation=True,
            max_length=options.length,
            return_tensors="pt",
        ).to(model.device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step}: loss {loss.item():.4f}")

    # 4. The adapter alone, in PEFT's form, and the whole model with it. Every rank calls; one writes.
    model.save_pretrained(options.output / "adapter")
    model = model.merge_and_unload()
    model.save_pretrained(options.output / "merged")
    if first():
        tokenizer.save_pretrained(options.output / "merged")

    # 5. What was saved, beside what was trained.
    prompt = tokenizer(texts[0][:40], return_tensors="pt", return_token_type_ids=False)
    answer = model.generate(**prompt.to(model.device), max_new_tokens=10, do_sample=False)  # on every rank
    if first():
        plain = LlamaForCausalLM.from_pretrained(options.output / "merged", dtype=model.dtype)
        alone = plain.generate(**prompt.to("cpu"), max_new_tokens=10, do_sample=False)
        same = "the same" if alone.tolist() == answer.tolist() else "other"
        say(f"plain transformers continues with {same} tokens: {tokenizer.decode(alone[0])!r}")


def first() -> bool:
    """Tell whether this rank speaks for all."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Print on one rank."""
    if first():
        print(text, flush=True)


if __name__ == "__main__":
    main()
