"""Tiny OPTs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny OPT of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 83,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "num_labels": 3,
        "dropout": dropout,
        "attention_dropout": dropout,
        "pad_token_id": 0,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
        "use_cache": False,
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": text_batch,
        "outputs": ("logits",),
        "options": {"attn_implementation": ("sdpa", "eager")},
        "sharded": ("q_proj", "out_proj", "fc1", "embed_tokens"),
        "refuses": ({"num_attention_heads": 7, "hidden_size": 56, "word_embed_proj_dim": 56},),
        "supports": Supports(captured=("attentions", "hidden_states")),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def cases() -> list[Case]:
    """Return a case for every class, and one for OPT-350m, whose norms follow and whose embedding is narrower."""
    generating = Supports(captured=("attentions", "hidden_states"), generation=True)
    after: dict[str, Any] = {"do_layer_norm_before": False, "word_embed_proj_dim": 48}
    return [
        _case("causal_lm", "OPTForCausalLM", supports=generating),
        _case("norms_after", "OPTForCausalLM", usual=after, supports=generating, refuses=()),
        _case("model", "OPTModel", outputs=("last_hidden_state",), loss=hidden_loss),
        _case("sequence_classification", "OPTForSequenceClassification"),
        _case("question_answering", "OPTForQuestionAnswering", outputs=("start_logits", "end_logits")),
    ]
