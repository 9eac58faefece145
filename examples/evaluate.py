"""Evaluate a model in a local folder with lm-eval, on one process or over tensor-parallel ranks.

    python examples/small.py llama runs/llama
    torchrun --standalone --nproc-per-node 2 examples/evaluate.py --model runs/llama --tasks arc_easy,gsm8k

`--tasks` are names of lm-eval, or of tasks of your own in the folder `--include`. Needs lm-eval and the model's pack.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lm_eval
import torch
import torch.distributed as dist
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from transformers import AutoModelForCausalLM, AutoTokenizer

import shardcore


def main() -> None:
    """Load the model, run the tasks, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a folder with a language model and its tokenizer")
    parser.add_argument("--tasks", required=True, help="a comma list")
    parser.add_argument("--include", type=Path, help="a folder with tasks of your own, as YAML")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--limit", type=int, help="the most documents of each task")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()

    # Each rank reads its part of the weights; tp is the number of all ranks.
    dtype = getattr(torch, options.dtype)
    model = shardcore.from_pretrained(AutoModelForCausalLM, options.model, dtype=dtype, inference_only=True)

    # lm-eval sees one model: all ranks ask it the same, and get the same scores and the same words.
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    found = lm_eval.simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=options.batch),
        tasks=options.tasks.split(","),
        task_manager=TaskManager(include_path=options.include),
        limit=options.limit,
    )
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(make_table(found))


if __name__ == "__main__":
    main()
