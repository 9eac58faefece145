"""Tiny ModernBERTs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny

_EAGER = {"attn_implementation": ("eager",)}


def build(name: str, *, dropout: float = 0.0, seed: int = 0, biases: bool = False, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "hidden_size": 48,
        "intermediate_size": 83,
        "num_hidden_layers": 2,  # the first attends to all tokens, the second to near ones
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "local_attention": 4,
        "num_labels": 2 if name.endswith(("MultipleChoice", "QuestionAnswering")) else 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "cls_token_id": 1,
        "eos_token_id": 2,
        "sep_token_id": 2,
        "attn_implementation": "eager",
        **{f"{part}_dropout": dropout for part in ("attention", "embedding", "mlp", "classifier")},
        **{f"{part}_bias": biases for part in ("attention", "mlp", "norm", "classifier")},
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "options": _EAGER,
        "outputs": ("logits",),
        "layers": "model.layers",
        "sharded": ("tok_embeddings", "attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
        "refuses": ({"num_attention_heads": 1},),
        "supports": Supports(
            tensor_parallel=(1, 2, 3, 4), sequence=True, context=True, captured=("attentions", "hidden_states")
        ),
        **fields,
    }
    return Case(name=name, build=partial(build, kind), inputs=text_batch, **settings)


def cases() -> list[Case]:
    """Return a case for every class."""
    both = {"attn_implementation": ("eager", "sdpa")}
    words = {**both, "tie_word_embeddings": (True, False), "biases": (False, True), "sparse_prediction": (False, True)}
    pools = {**_EAGER, "classifier_pooling": ("cls", "mean")}
    spans = ("start_logits", "end_logits")
    return [
        _case("masked_lm", "ModernBertForMaskedLM", options=words),
        _case(
            "model",
            "ModernBertModel",
            options=both,
            outputs=("last_hidden_state",),
            loss=hidden_loss,
            layers="layers",
        ),
        _case("sequence_classification", "ModernBertForSequenceClassification", options=pools),
        _case("token_classification", "ModernBertForTokenClassification"),
        _case("question_answering", "ModernBertForQuestionAnswering", outputs=spans),
        _case("multiple_choice", "ModernBertForMultipleChoice", options=pools),
    ]
