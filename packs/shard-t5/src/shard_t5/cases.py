"""Tiny T5s for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

from shardcore_testing import Case, Supports, encoder_decoder_batch, hidden_loss, tiny


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "d_model": 32,
        "d_kv": 12,
        "d_ff": 43,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": 4,  # together wider than the model
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "num_labels": 2 if name.endswith("QuestionAnswering") else 3,
        "dropout_rate": dropout,
        "classifier_dropout": dropout,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
        "attn_implementation": "eager",
        **options,
    }
    model = tiny(getattr(transformers, name), seed=seed, **settings)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("Attention.q.weight"):  # it scales the scores, which attention does not
                parameter.mul_(settings["d_kv"] ** -0.5)
    return model


#: Before some release of transformers 5 it has no other.
_ATTENTION = ("eager", "sdpa") if transformers.T5PreTrainedModel._supports_sdpa else ("eager",)
_BOTH = ("decoder_attentions", "cross_attentions", "decoder_hidden_states", "encoder_attentions")


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": encoder_decoder_batch,
        "outputs": ("logits",),
        "layers": "transformer.decoder.block",
        "collectives": (3, 3),
        "sharded": (".q.", ".o.", ".wi", ".wo.", "shared", "relative_attention_bias"),
        "refuses": ({"num_heads": 5},),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def _family(family: str, prefix: str, **usual: Any) -> list[Case]:
    """Return a case for every class of a family; the one that generates has heads for three ranks too."""
    ways = ("gated-gelu", "relu")[:: 1 if usual else -1]
    sizes = (1, 2) if usual.get("num_heads") == 2 else (1, 2, 4)
    both: dict[str, Any] = {"usual": usual, "supports": Supports(sequence=True, captured=_BOTH, tensor_parallel=sizes)}
    alone: dict[str, Any] = {
        "collectives": (2, 2),
        "supports": Supports(sequence=True, captured=("attentions", "hidden_states"), tensor_parallel=sizes),
        "usual": usual,
    }
    return [
        _case(
            f"{prefix}conditional_generation",
            f"{family}ForConditionalGeneration",
            layers="decoder.block",
            options={
                "feed_forward_proj": ways,
                "tie_word_embeddings": (True, False),
                "attn_implementation": _ATTENTION,
            },
            supports=Supports(sequence=True, captured=_BOTH, generation=True, tensor_parallel=(1, 2, 3, 4)),
            usual={**usual, "num_heads": 12, "d_kv": 4},
        ),
        _case(
            f"{prefix}model",
            f"{family}Model",
            layers="decoder.block",
            outputs=("last_hidden_state", "encoder_last_hidden_state"),
            loss=hidden_loss,
            **both,
        ),
        _case(
            f"{prefix}encoder",
            f"{family}EncoderModel",
            layers="encoder.block",
            outputs=("last_hidden_state",),
            loss=hidden_loss,
            **alone,
        ),
        _case(f"{prefix}sequence_classification", f"{family}ForSequenceClassification", **both),
        _case(
            f"{prefix}token_classification",
            f"{family}ForTokenClassification",
            layers="transformer.encoder.block",
            **alone,
        ),
        _case(
            f"{prefix}question_answering",
            f"{family}ForQuestionAnswering",
            layers="decoder.block",
            outputs=("start_logits", "end_logits"),
            **both,
        ),
    ]


def cases() -> list[Case]:
    """Return a case for every class; mT5 and umT5 have gated feed-forwards, as T5 1.1 has."""
    gated = {"feed_forward_proj": "gated-gelu", "num_heads": 2, "d_kv": 20}
    return [*_family("T5", ""), *_family("MT5", "mt5_", **gated), *_family("UMT5", "umt5_", **gated)]
