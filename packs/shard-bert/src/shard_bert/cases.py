"""Tiny BERTs for the conformance kit: every class that the pack serves, and a decoder with cross-attention."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss

_OLD = Version(transformers.__version__) < Version("5")
#: What most cases use, because it can return its weights.
_EAGER = {"attn_implementation": ("eager",)}


def build(name: str, *, seed: int = 0, dropout: float = 0.0, **options: Any) -> Any:
    """Return the BERT of class ``name`` in float64, every parameter random, and no position like another."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "hidden_size": 48,
        "intermediate_size": 83,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "use_cache": False,
        "attn_implementation": "eager",
        **options,
    }
    model = getattr(transformers, name)(transformers.BertConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            spread = 1.0 if "position_embeddings" in label else 0.2
            middle = float(label.endswith("LayerNorm.weight"))  # around 0, every token would be the same
            parameter.copy_(middle + spread * torch.randn(parameter.shape, generator=generator))
    return model.double()


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return a batch of three right-padded sequences for ``model``, with its labels."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=generator)

    name, config = type(model).__name__.removeprefix("FSDP"), model.config
    shape = (3, 2, 7) if name == "BertForMultipleChoice" else (3, 7)
    lengths = torch.tensor([7, 5, 6]).roll(seed)
    mask = (torch.arange(7) < lengths[:, None]).long().view(3, *(1,) * (len(shape) - 2), 7).expand(shape).contiguous()
    ids = (1 + integers(config.vocab_size - 1, *shape)) * mask
    batch = {"input_ids": ids, "attention_mask": mask, "token_type_ids": integers(2, *shape)}
    if config.add_cross_attention:
        states = torch.randn(3, 6, config.hidden_size, generator=generator, dtype=torch.float64)
        theirs = (torch.arange(6) < torch.tensor([6, 4, 5])[:, None]).long()
        batch |= {"encoder_hidden_states": states, "encoder_attention_mask": theirs}
    ignored = (mask == 0) | (integers(2, *shape) == 1)
    match name:
        case "BertForMaskedLM":
            batch["labels"] = ids.masked_fill(ignored, -100)
        case "BertForPreTraining":
            batch |= {"labels": ids.masked_fill(ignored, -100), "next_sentence_label": integers(2, 3)}
        case "BertLMHeadModel":
            batch["labels"] = ids.masked_fill(mask == 0, -100)
        case "BertForTokenClassification":
            batch["labels"] = integers(config.num_labels, *shape).masked_fill(mask == 0, -100)
        case "BertForSequenceClassification":
            batch["labels"] = integers(config.num_labels, 3)
        case "BertForNextSentencePrediction" | "BertForMultipleChoice":
            batch["labels"] = integers(2, 3)
        case "BertForQuestionAnswering":
            batch["start_positions"] = integers(3, 3)
            batch["end_positions"] = batch["start_positions"] + 1
    return batch


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "options": _EAGER,
        "outputs": ("logits",),
        "layers": "bert.encoder.layer",
        "sharded": ("word_embeddings.weight", "query.bias", "intermediate.dense.weight"),
        "refuses": ({"num_attention_heads": 3},),
        "supports": Supports(
            sequence=True,
            context=True,
            captured=("attentions", "hidden_states"),
            micro_batches=kind != "BertForPreTraining",  # means over words and over rows
        ),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def cases() -> list[Case]:
    """Return a case for every class, and one for a decoder that attends to an encoder's states."""
    both = {"attn_implementation": ("eager", "sdpa")}
    # Before transformers 5, sdpa with a mask fails in a float64 decoder, unsharded too.
    decoding = _EAGER if _OLD else both
    decoder, ties = {"is_decoder": True}, {"tie_word_embeddings": (True, False)}
    states, words = ("last_hidden_state", "pooler_output"), ("prediction_logits", "seq_relationship_logits")
    generates = Supports(sequence=True, captured=("attentions", "hidden_states"), generation=True)
    crosses = Supports(sequence=True, captured=("attentions", "cross_attentions", "hidden_states"), generation=True)
    across: dict[str, Any] = {"usual": {**decoder, "add_cross_attention": True}, "collectives": (3, 3)}
    three: dict[str, Any] = {"usual": {"num_labels": 3}}
    return [
        _case("model", "BertModel", options=both, outputs=states, loss=hidden_loss, layers="encoder.layer"),
        _case("pretraining", "BertForPreTraining", options={**_EAGER, **ties}, outputs=words),
        _case("masked_lm", "BertForMaskedLM", options={**both, **ties, "vocab_size": (101, 97, 5)}),
        _case("causal_lm", "BertLMHeadModel", usual=decoder, options=decoding, supports=generates),
        _case("cross_attention", "BertLMHeadModel", **across, options=decoding, supports=crosses),
        _case("next_sentence", "BertForNextSentencePrediction"),
        _case("sequence_classification", "BertForSequenceClassification", **three),
        _case("multiple_choice", "BertForMultipleChoice"),
        _case("token_classification", "BertForTokenClassification", **three, options={**_EAGER, "num_labels": (3, 2)}),
        _case("question_answering", "BertForQuestionAnswering", outputs=("start_logits", "end_logits")),
    ]
