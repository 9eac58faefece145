"""Continue a text with a byte-level model in plain transformers: nothing here knows of shardcore.

`train_llama.py` takes `generate` from here, and runs this file in a fresh process on the folder it saved.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging


def generate(model: PreTrainedModel, prompt: str, count: int) -> list[int]:
    """Return the ``count`` bytes that the model takes for the likeliest, one after the other."""
    ids = torch.tensor([list(prompt.encode())])
    # So small a model would say "the the the" for ever.
    options = {"max_new_tokens": count, "do_sample": False, "no_repeat_ngram_size": 8}
    new = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return list(new[0, ids.size(1) :].tolist())


def main(folder: str, prompt: str, count: str) -> None:
    """Print the new bytes as a JSON list."""
    logging.disable_progress_bar()
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    if problems := {kind: sorted(names) for kind, names in loading.items() if names}:
        raise SystemExit(f"{folder} does not hold what the model needs: {problems}")
    if "shardcore" in sys.modules:
        raise SystemExit("shardcore was imported: this would prove nothing about plain transformers")
    print(json.dumps(generate(model, prompt, int(count))))


if __name__ == "__main__":
    main(*sys.argv[1:])
