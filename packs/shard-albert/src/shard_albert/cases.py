"""Tiny ALBERTs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny

_EAGER = {"attn_implementation": ("eager",)}


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "embedding_size": 24,
        "hidden_size": 48,
        "intermediate_size": 83,
        "num_hidden_layers": 3,
        "num_hidden_groups": 2,  # the first runs twice
        "inner_group_num": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "num_labels": 2 if name.endswith(("MultipleChoice", "QuestionAnswering", "PreTraining")) else 3,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "classifier_dropout_prob": dropout,
        "attn_implementation": "eager",
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return a batch with token types, and for pretraining with the order of sentences."""
    batch = text_batch(model, seed)
    generator = torch.Generator().manual_seed(seed)
    batch["token_type_ids"] = torch.randint(0, 2, batch["input_ids"].shape, generator=generator)
    if type(model).__name__.endswith("PreTraining"):
        batch["sentence_order_label"] = torch.randint(0, 2, (len(batch["input_ids"]),), generator=generator)
    return batch


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "options": _EAGER,
        "outputs": ("logits",),
        "layers": "albert.encoder.albert_layer_groups.1.albert_layers",
        "collectives": (2, 4),
        "sharded": ("word_embeddings", "attention.query", "attention.dense", "ffn.weight", "ffn_output"),
        "refuses": ({"num_attention_heads": 1},),
        "supports": Supports(
            tensor_parallel=(1, 2, 3, 4),
            checkpointing=False,
            captured=("attentions", "hidden_states"),
            micro_batches=kind != "AlbertForPreTraining",  # means over words and over rows
        ),
        **fields,
    }
    return Case(name=name, build=partial(build, kind), inputs=inputs, **settings)


def cases() -> list[Case]:
    """Return a case for every class."""
    both = {"attn_implementation": ("eager", "sdpa")}
    ties = {"tie_word_embeddings": (True, False)}
    states: dict[str, Any] = {
        "outputs": ("last_hidden_state", "pooler_output"),
        "loss": hidden_loss,
        "layers": "encoder.albert_layer_groups.1.albert_layers",
    }
    return [
        _case("pretraining", "AlbertForPreTraining", options=_EAGER, outputs=("prediction_logits", "sop_logits")),
        _case("masked_lm", "AlbertForMaskedLM", options={**both, **ties}),
        _case("model", "AlbertModel", options={**_EAGER, "inner_group_num": (2, 1)}, **states),
        _case("sequence_classification", "AlbertForSequenceClassification"),
        _case("token_classification", "AlbertForTokenClassification"),
        _case("question_answering", "AlbertForQuestionAnswering", outputs=("start_logits", "end_logits")),
        _case("multiple_choice", "AlbertForMultipleChoice"),
    ]
