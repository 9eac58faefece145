"""Tiny ERNIEs for the conformance kit (`shardcore_testing`)."""

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
        "hidden_size": 48,
        "intermediate_size": 83,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "task_type_vocab_size": 3,
        "use_task_id": True,
        "num_labels": 3 if name.endswith(("SequenceClassification", "TokenClassification")) else 2,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "use_cache": False,
        "attn_implementation": "eager",
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return a batch with types of tokens and tasks, and what pretraining and cross-attention take."""
    batch = text_batch(model, seed)
    generator = torch.Generator().manual_seed(seed)
    shape = batch["input_ids"].shape
    batch["token_type_ids"] = torch.randint(0, 2, shape, generator=generator)
    if model.config.use_task_id and len(shape) == 2:  # a multiple choice takes them for no choice
        batch["task_type_ids"] = torch.randint(0, 3, shape, generator=generator)
    if type(model).__name__.endswith("PreTraining"):
        batch["next_sentence_label"] = torch.randint(0, 2, (len(batch["input_ids"]),), generator=generator)
    if model.config.add_cross_attention:
        states = torch.randn(3, 6, model.config.hidden_size, generator=generator, dtype=torch.float64)
        theirs = (torch.arange(6) < torch.tensor([6, 4, 5])[:, None]).long()
        batch |= {"encoder_hidden_states": states, "encoder_attention_mask": theirs}
    return batch


def _supports(*captured: str, **fields: Any) -> Supports:
    sizes, outputs = (1, 2, 3, 4), ("attentions", *captured, "hidden_states")
    divides = not fields.get("generation")  # an encoder
    return Supports(tensor_parallel=sizes, sequence=True, context=divides, captured=outputs, **fields)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "options": _EAGER,
        "outputs": ("logits",),
        "layers": "ernie.encoder.layer",
        "sharded": ("word_embeddings.weight", "query.bias", "intermediate.dense.weight"),
        "refuses": ({"num_attention_heads": 1},),
        "supports": _supports(micro_batches=kind != "ErnieForPreTraining"),  # means over words and over rows
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def cases() -> list[Case]:
    """Return a case for every class; the first is a decoder that attends to an encoder's states."""
    both = {"attn_implementation": ("eager", "sdpa")}
    crosses = _supports("cross_attentions", generation=True)
    across: dict[str, Any] = {"usual": {"is_decoder": True, "add_cross_attention": True}, "collectives": (3, 3)}
    words = ("prediction_logits", "seq_relationship_logits")
    states: dict[str, Any] = {
        "outputs": ("last_hidden_state", "pooler_output"),
        "loss": hidden_loss,
        "layers": "encoder.layer",
    }
    return [
        _case("cross_attention", "ErnieForCausalLM", **across, supports=crosses),
        _case("causal_lm", "ErnieForCausalLM", usual={"is_decoder": True}, supports=_supports(generation=True)),
        _case("masked_lm", "ErnieForMaskedLM", options={**both, "use_task_id": (True, False)}),
        _case("pretraining", "ErnieForPreTraining", outputs=words),
        _case("model", "ErnieModel", **states),
        _case("next_sentence", "ErnieForNextSentencePrediction"),
        _case("sequence_classification", "ErnieForSequenceClassification"),
        _case("multiple_choice", "ErnieForMultipleChoice"),
        _case("token_classification", "ErnieForTokenClassification"),
        _case("question_answering", "ErnieForQuestionAnswering", outputs=("start_logits", "end_logits")),
    ]
