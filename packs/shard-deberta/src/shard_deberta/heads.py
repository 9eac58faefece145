"""The head of DeBERTa-v2 that scores words: by a decoder that is tied to the embedding, its bias beside it."""

from __future__ import annotations

from typing import Any

from shard_bert.heads import masked_lm_loss
from shardcore.policy import ModulePolicy
from shardcore.styles import head, loss, norm, refuse, replicate

_NO_DECODER = "with legacy=False the head has no decoder: it multiplies by the embedding of words, which is split"


def masked_lm(model: Any) -> ModulePolicy:
    """Return the rules of the head of ``model``."""
    return {
        "LegacyDebertaV2PredictionHeadTransform": [replicate("dense"), norm("LayerNorm")],
        "LegacyDebertaV2LMPredictionHead": [head("decoder", bias="bias")],
        model: [refuse(_reads_the_table, _NO_DECODER, todo="build the model with legacy=True"), loss(masked_lm_loss)],
    }


def _reads_the_table(model: Any) -> bool:
    return not model.config.legacy
