"""Tiny BLOOMs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny BLOOM of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "hidden_size": 48,
        "n_layer": 2,
        "n_head": 4,
        "num_labels": 3,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "pad_token_id": 0,
        "eos_token_id": None,
        "use_cache": False,
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "outputs": ("logits",),
        "layers": "transformer.h",
        "sharded": ("word_embeddings.weight", "query_key_value", "dense.weight", "dense_h_to_4h", "dense_4h_to_h"),
        "refuses": ({"n_head": 3}, {"pretraining_tp": 2, "slow_but_exact": True}),
        "supports": Supports(captured=("attentions", "hidden_states"), sequence=True),
        **fields,
    }
    return Case(name=name, build=partial(build, kind), inputs=text_batch, **settings)


def cases() -> list[Case]:
    """Return a case for every class."""
    words = {"apply_residual_connection_post_layernorm": (False, True), "tie_word_embeddings": (True, False)}
    generates = Supports(captured=("attentions", "hidden_states"), generation=True, sequence=True)
    return [
        _case("causal_lm", "BloomForCausalLM", options=words, supports=generates),
        _case("model", "BloomModel", outputs=("last_hidden_state",), loss=hidden_loss, layers="h"),
        _case("sequence_classification", "BloomForSequenceClassification"),
        _case("token_classification", "BloomForTokenClassification"),
        _case("question_answering", "BloomForQuestionAnswering", outputs=("start_logits", "end_logits")),
    ]
