"""Tiny Llamas for the conformance kit (`shardcore.testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from shardcore.testing import Case, Supports

__all__ = ["cases"]


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a Llama whose every parameter, biases too, is drawn at random."""
    settings: dict[str, Any] = {
        "vocab_size": 101,
        "hidden_size": 64,
        "intermediate_size": 83,  # divides by no number of ranks
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "attention_bias": True,
        "mlp_bias": True,
        "num_labels": 3,
        "attention_dropout": dropout,
        "classifier_dropout": dropout,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
        "use_cache": False,
        **options,
    }
    model = getattr(transformers, name)(transformers.LlamaConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids (3, 7) with the labels of the model's class; the padding differs with the seed."""
    generator = torch.Generator().manual_seed(seed)
    config, rows, length = model.config, 3, 7
    mask = torch.ones(rows, length, dtype=torch.long)
    for row, pads in enumerate(((0, 3, 1), (2, 0, 5), (4, 4, 0))[seed % 3]):
        mask[row, length - pads :] = 0
    ids = torch.randint(1, config.vocab_size, (rows, length), generator=generator) * mask
    labels = torch.randint(0, config.num_labels, (rows, length), generator=generator)
    batch = {"input_ids": ids, "attention_mask": mask}
    match type(model).__name__:
        case "LlamaForCausalLM":
            return {**batch, "labels": ids.masked_fill(mask == 0, -100)}
        case "LlamaForSequenceClassification":
            return {**batch, "labels": labels[:, 0]}
        case "LlamaForTokenClassification":
            return {**batch, "labels": labels.masked_fill(mask == 0, -100)}
        case "LlamaForQuestionAnswering":
            return {**batch, "start_positions": labels[:, 0], "end_positions": labels[:, 0] + 1}
    return batch


def hidden_loss(out: Any) -> Tensor:
    """Return a loss for the bare decoder: a weighted sum of its hidden states."""
    hidden: Tensor = out.last_hidden_state
    weights = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return (hidden * weights).sum()


_ATTENTION = {"attn_implementation": ("sdpa", "eager")}
_LAYER = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "embed_tokens")
_REFUSED = ({"num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 56},)


def _case(name: str, kind: str, **fields: Any) -> Case:
    outputs = {"LlamaModel": ("last_hidden_state",), "LlamaForQuestionAnswering": ("start_logits", "end_logits")}
    settings: dict[str, Any] = {
        "build": partial(build, kind),
        "inputs": inputs,
        "outputs": outputs.get(kind, ("logits",)),
        "options": _ATTENTION,
        "sharded": _LAYER,
        "refuses": _REFUSED,
        "supports": Supports(sequence=True, captured=("attentions", "hidden_states")),
        **fields,
    }
    return Case(name=name, **settings)


def cases() -> list[Case]:
    """Return a case for every class, and for what decoders differ in: shared KV heads, tied and odd vocabularies."""
    generating = Supports(sequence=True, captured=("attentions", "hidden_states"), generation=True)
    shared = partial(build, "LlamaForCausalLM", num_key_value_heads=2, tie_word_embeddings=True, vocab_size=97)
    return [
        _case("causal_lm", "LlamaForCausalLM", sharded=(*_LAYER, "lm_head"), supports=generating),
        # The parts of shared KV heads are gathered, and their gradients summed, in one collective more each way.
        _case(
            "tied_shared_kv",
            "LlamaForCausalLM",
            build=shared,
            collectives=(3, 3),
            sharded=("q_proj",),
            supports=generating,
        ),
        _case("model", "LlamaModel", loss=hidden_loss),
        _case("sequence_classification", "LlamaForSequenceClassification"),
        _case("token_classification", "LlamaForTokenClassification"),
        _case("question_answering", "LlamaForQuestionAnswering"),
    ]
