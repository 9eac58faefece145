"""Tiny DeBERTas for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "hidden_size": 48,
        "intermediate_size": 83,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16,
        "type_vocab_size": 2,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "num_labels": 3 if name.endswith(("SequenceClassification", "TokenClassification")) else 2,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "pooler_dropout": dropout,
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return a batch with types of tokens."""
    batch = text_batch(model, seed)
    generator = torch.Generator().manual_seed(seed)
    batch["token_type_ids"] = torch.randint(0, 2, batch["input_ids"].shape, generator=generator)
    return batch


def _supports(*, sizes: tuple[int, ...] = (1, 2, 3, 4)) -> Supports:
    return Supports(tensor_parallel=sizes, sequence=True, captured=("attentions", "hidden_states"))


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "outputs": ("logits",),
        "layers": "deberta.encoder.layer",
        "collectives": (2, 3),  # the relative positions enter each block
        "sharded": ("word_embeddings", "query_proj", "intermediate.dense"),
        "refuses": ({"num_attention_heads": 1},),
        "supports": _supports(),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def cases() -> list[Case]:
    """Return a case for every class, two of them as checkpoints are: shared keys and buckets, and a convolution."""
    ways = {"pos_att_type": (["c2p", "p2c"], ["p2c"]), "relative_attention": (True, False)}
    shared: dict[str, Any] = {
        "share_att_key": True,
        "position_buckets": 4,
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    }
    # The norm of the positions runs once for all blocks, and each reentrant checkpoint would go back through it.
    once = replace(_supports(), reentrant=False)
    mixed: dict[str, Any] = {"usual": {**shared, "conv_kernel_size": 3}, "supports": replace(once, sequence=False)}
    states: dict[str, Any] = {"outputs": ("last_hidden_state",), "loss": hidden_loss, "layers": "encoder.layer"}
    spans = ("start_logits", "end_logits")
    refused = ({"legacy": False},)
    first: dict[str, Any] = {
        "sharded": ("word_embeddings", "in_proj", "q_bias", "intermediate.dense"),
        "refuses": ({"num_attention_heads": 3}, {"talking_head": True}),
        "supports": _supports(sizes=(1, 2, 4)),
    }
    return [
        _case("masked_lm", "DebertaV2ForMaskedLM", options=ways),
        _case("shared", "DebertaV2ForMaskedLM", usual=shared, refuses=refused, supports=once),
        _case("convolution", "DebertaV2ForMaskedLM", **mixed),
        _case("model", "DebertaV2Model", **states),
        _case("sequence_classification", "DebertaV2ForSequenceClassification"),
        _case("multiple_choice", "DebertaV2ForMultipleChoice"),
        _case("token_classification", "DebertaV2ForTokenClassification"),
        _case("question_answering", "DebertaV2ForQuestionAnswering", outputs=spans),
        _case("first_masked_lm", "DebertaForMaskedLM", **first, options={"pos_att_type": ways["pos_att_type"]}),
        _case("first_model", "DebertaModel", **{**first, **states}),
        _case("first_sequence_classification", "DebertaForSequenceClassification", **first),
        _case("first_token_classification", "DebertaForTokenClassification", **first),
        _case("first_question_answering", "DebertaForQuestionAnswering", **first, outputs=spans),
    ]
