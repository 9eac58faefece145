"""Tiny Gemmas for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from typing import Any

import torch

import shard_llama.cases
from shard_llama.cases import decoder_cases
from shardcore_testing import Case

__all__ = ["build", "cases"]


def build(name: str, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``options`` change its configuration.

    Its norms multiply by 1 + weight: their weights lie around 0, where those of other families lie around 1.
    """
    model = shard_llama.cases.build(name, **options)
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                module.weight.sub_(1)
    return model


_FIELDS: dict[str, Any] = {
    "build": build,
    "sizes": (1, 2, 3, 4),
    "refuses": ({"num_attention_heads": 1, "num_key_value_heads": 1},),
}
_GEMMA: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": False}
#: One layer sees a window of the tokens; logits are capped where they are large.
_LAYERS = {
    **_GEMMA,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": 2.0,
}
#: Only the attention that is written out caps its scores.
_CAPPED = {**_LAYERS, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"}


def cases() -> list[Case]:
    """Return the cases of Gemma, Gemma 2 and Gemma 3."""
    return [
        *decoder_cases("Gemma", prefix="gemma_", usual=_GEMMA, **_FIELDS),
        *decoder_cases("Gemma2", prefix="gemma2_", usual=_CAPPED, options={}, **_FIELDS),
        # The norms on queries and keys have partial gradients: one collective more in the backward.
        *decoder_cases("Gemma3", headless="Gemma3Text", prefix="gemma3_", usual=_LAYERS, collectives=(2, 3), **_FIELDS),
    ]
