"""Tiny Falcons for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny

#: What distinguishes the generations.
_NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}  # 40B
_MULTI_QUERY = {"multi_query": True}  # 7B
_ALIBI = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}  # RW

_BOTH = {"attn_implementation": ("eager", "sdpa")}


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny Falcon of the class ``name``; ``options`` change its configuration."""
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "hidden_size": 48,
        "ffn_hidden_size": 83,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "num_labels": 3,
        "hidden_dropout": dropout,
        "attention_dropout": dropout,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "use_cache": False,
        "attn_implementation": "eager",
        **options,
    }
    return tiny(getattr(transformers, name), seed=seed, **settings)


def _case(name: str, kind: str, usual: dict[str, Any], **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "outputs": ("logits",),
        "layers": "transformer.h",
        "sharded": ("word_embeddings.weight", "query_key_value", "dense.weight", "dense_h_to_4h", "dense_4h_to_h"),
        "refuses": ({"num_attention_heads": 1, "num_kv_heads": 1},),
        "supports": Supports(tensor_parallel=(1, 2, 3, 4), sequence=True, captured=("attentions", "hidden_states")),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **usual), inputs=text_batch, **settings)


def cases() -> list[Case]:
    """Return a case for every class, and for every generation."""
    generates: dict[str, Any] = {"sequence": True, "captured": ("attentions", "hidden_states"), "generation": True}
    some, any_number = Supports(**generates), Supports(tensor_parallel=(1, 2, 3, 4), **generates)
    new = {**_BOTH, "num_ln_in_parallel_attn": (2, 1), "bias": (False, True), "tie_word_embeddings": (True, False)}
    rw = {**_BOTH, "parallel_attn": (False, True)}
    few = ({"num_attention_heads": 3},)
    return [
        _case("causal_lm", "FalconForCausalLM", _NEW, options=new, supports=any_number),
        _case("multi_query", "FalconForCausalLM", _MULTI_QUERY, options=_BOTH, supports=any_number),
        _case("alibi", "FalconForCausalLM", _ALIBI, options=rw, supports=some, refuses=few),
        _case("model", "FalconModel", _MULTI_QUERY, outputs=("last_hidden_state",), loss=hidden_loss, layers="h"),
        _case("sequence_classification", "FalconForSequenceClassification", _NEW),
        _case("token_classification", "FalconForTokenClassification", _MULTI_QUERY),
        _case("question_answering", "FalconForQuestionAnswering", _MULTI_QUERY, outputs=("start_logits", "end_logits")),
    ]
