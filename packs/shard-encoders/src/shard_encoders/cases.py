"""Tiny encoders for the conformance kit (`shardcore_testing`)."""

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
        "max_position_embeddings": 34,
        "type_vocab_size": 2,
        "num_labels": 2 if name.endswith(("MultipleChoice", "QuestionAnswering")) else 3,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "attention_dropout": dropout,
        "pad_token_id": 0,
        "use_cache": False,
        "attn_implementation": "eager",
        **options,
    }
    model = tiny(getattr(transformers, name), seed=seed, **settings)
    for path, parameter in model.named_parameters():
        # Of ESM: no forward reads it. A table of sines is frozen until it is loaded from files.
        parameter.requires_grad_("contact_head" not in path)
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return a batch with token types where the model takes them, and what pretraining takes."""
    batch = text_batch(model, seed)
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__.removeprefix("FSDP")
    if not name.startswith(("Esm", "EuroBert", "MPNet")):
        batch["token_type_ids"] = torch.randint(0, 2, batch["input_ids"].shape, generator=generator)
    if name.startswith("MegatronBert") and name.endswith("PreTraining"):
        batch["next_sentence_label"] = torch.randint(0, 2, (3,), generator=generator)
    return batch


_CAPTURED = ("attentions", "hidden_states")
_ENCODER = Supports(sequence=True, context=True, captured=_CAPTURED)
#: By what the names of classes begin with: the name of the encoder in the model, options of the configuration, and
#: fields of its cases.
_FAMILIES: dict[str, dict[str, Any]] = {
    "Camembert": {"encoder": "roberta"},
    "Electra": {"encoder": "electra", "usual": {"embedding_size": 36, "summary_last_dropout": 0.0}},
    "Esm": {
        "encoder": "esm",
        "usual": {"position_embedding_type": "rotary", "token_dropout": False},
        "sharded": ("query.bias", "intermediate.dense.weight"),
    },
    "EuroBert": {
        "encoder": "model",
        "usual": {"num_key_value_heads": 4},
        "blocks": "layers",
        "sharded": ("embed_tokens.weight", "q_proj.weight", "up_proj.weight"),
    },
    "MPNet": {
        "encoder": "mpnet",
        "usual": {"relative_attention_num_buckets": 32},
        "attention": ("eager",),
        "supports": replace(_ENCODER, context=False, checkpointing=False),
        "sharded": ("word_embeddings.weight", "attn.q.bias", "relative_attention_bias"),
    },
    "MegatronBert": {"encoder": "bert", "attention": ("eager",), "supports": replace(_ENCODER, context=False)},
    "RoFormer": {
        "encoder": "roformer",
        "usual": {"embedding_size": 36},
        "attention": ("eager",),
        "supports": replace(_ENCODER, context=False),
    },
    "XLMRobertaXL": {"encoder": "roberta"},
}
_HEADS = (
    "MaskedLM",
    "CausalLM",
    "PreTraining",
    "NextSentencePrediction",
    "SequenceClassification",
    "TokenClassification",
    "MultipleChoice",
    "QuestionAnswering",
)


def _case(family: str, head: str) -> Case:
    """Return the case for a head of a family, or for the encoder alone."""
    own = _FAMILIES[family]
    supports = own.get("supports", _ENCODER)
    usual = dict(own.get("usual", {}))
    if head == "CausalLM":
        usual["is_decoder"] = True
        supports = replace(supports, context=False, generation=True)
    if head == "PreTraining":
        supports = replace(supports, micro_batches=family == "Electra")  # else means over words and over rows
    outputs = {
        "": ("last_hidden_state",),
        "PreTraining": ("logits",) if family == "Electra" else ("prediction_logits", "seq_relationship_logits"),
        "QuestionAnswering": ("start_logits", "end_logits"),
    }
    blocks = own.get("blocks", "encoder.layer")
    return Case(
        name=f"{family.lower()}_{head.lower() or 'model'}",
        build=partial(build, f"{family}For{head}" if head else f"{family}Model", **usual),
        inputs=inputs,
        loss="loss" if head else hidden_loss,
        outputs=outputs.get(head, ("logits",)),
        layers=f"{own['encoder']}.{blocks}" if head else blocks,
        options={"attn_implementation": own.get("attention", ("eager", "sdpa"))},
        sharded=own.get("sharded", ("word_embeddings.weight", "query.bias", "intermediate.dense.weight")),
        refuses=({"num_attention_heads": 3},),
        supports=supports,
        tolerance=1e-7 if (family, head) == ("Electra", "PreTraining") else 1e-12,  # a loss of labels in float32
    )


def cases() -> list[Case]:
    """Return a case for every class."""
    kinds = [(family, head) for family in _FAMILIES for head in ("", *_HEADS)]
    return [_case(*kind) for kind in kinds if not kind[1] or hasattr(transformers, "{}For{}".format(*kind))]
