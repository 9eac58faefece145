"""Tiny RoBERTas for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny

_OLD = Version(transformers.__version__) < Version("5")
# XLMRobertaForMultipleChoice reads the output of a pooler that it does not have there.
_NO_POOLER = Version("5") <= Version(transformers.__version__) < Version("5.14")


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
        "pad_token_id": 0,
        "use_cache": False,
        "attn_implementation": "eager",
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return a batch with token types, and for a decoder with cross-attention the states of an encoder."""
    batch = text_batch(model, seed)
    generator = torch.Generator().manual_seed(seed)
    batch["token_type_ids"] = torch.randint(0, 2, batch["input_ids"].shape, generator=generator)
    if model.config.add_cross_attention:
        states = torch.randn(3, 6, model.config.hidden_size, generator=generator, dtype=torch.float64)
        theirs = (torch.arange(6) < torch.tensor([6, 4, 5])[:, None]).long()
        batch |= {"encoder_hidden_states": states, "encoder_attention_mask": theirs}
    return batch


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "options": {"attn_implementation": ("eager",)},
        "outputs": ("logits",),
        "layers": "roberta.encoder.layer",
        "sharded": ("word_embeddings.weight", "query.bias", "intermediate.dense.weight"),
        "refuses": ({"num_attention_heads": 3},),
        "supports": Supports(sequence=True, context=True, captured=("attentions", "hidden_states")),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def cases() -> list[Case]:
    """Return a case for every class; those of XLM-RoBERTa are the same modules under other names."""
    both = {"attn_implementation": ("eager", "sdpa")}
    # Before transformers 5, sdpa with a mask fails in a float64 decoder, unsharded too.
    decoding = {"attn_implementation": ("eager",)} if _OLD else both
    crosses = Supports(sequence=True, captured=("attentions", "cross_attentions", "hidden_states"), generation=True)
    across: dict[str, Any] = {"is_decoder": True, "add_cross_attention": True}
    generates = Supports(sequence=True, captured=("attentions", "hidden_states"), generation=True)
    states: dict[str, Any] = {
        "outputs": ("last_hidden_state", "pooler_output"),
        "loss": hidden_loss,
        "layers": "encoder.layer",
        "options": both,
    }
    spans = ("start_logits", "end_logits")
    found = []
    for family, prefix in (("Roberta", ""), ("XLMRoberta", "xlm_")):
        found += [
            _case(f"{prefix}masked_lm", f"{family}ForMaskedLM", options={**both, "tie_word_embeddings": (True, False)}),
            _case(f"{prefix}model", f"{family}Model", **states),
            _case(
                f"{prefix}causal_lm",
                f"{family}ForCausalLM",
                usual={"is_decoder": True},
                options=decoding,
                supports=generates,
            ),
            _case(f"{prefix}sequence_classification", f"{family}ForSequenceClassification"),
            *(
                []
                if family == "XLMRoberta" and _NO_POOLER
                else [_case(f"{prefix}multiple_choice", f"{family}ForMultipleChoice")]
            ),
            _case(f"{prefix}token_classification", f"{family}ForTokenClassification"),
            _case(f"{prefix}question_answering", f"{family}ForQuestionAnswering", outputs=spans),
        ]
    found.append(
        _case(
            "cross_attention",
            "RobertaForCausalLM",
            usual=across,
            collectives=(3, 3),
            options=decoding,
            supports=crosses,
        )
    )
    return found
