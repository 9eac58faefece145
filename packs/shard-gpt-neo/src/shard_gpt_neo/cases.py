"""Tiny models of every family for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import transformers
from transformers.models.gptj import modeling_gptj

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny

_COMMON: dict[str, Any] = {
    "vocab_size": 101,  # divides by no number of ranks
    "num_labels": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "use_cache": False,
}
_SIZES: dict[str, dict[str, Any]] = {
    "GPTNeo": {
        "hidden_size": 64,
        "intermediate_size": 83,
        "num_layers": 2,
        "attention_types": [[["global", "local"], 1]],
        "window_size": 4,
        "num_heads": 4,
        "max_position_embeddings": 32,
    },
    "GPTJ": {
        "n_embd": 64,
        "n_inner": 83,
        "n_layer": 2,
        "n_head": 4,
        "rotary_dim": 8,
        "n_positions": 32,
        "attn_implementation": "eager",
    },
    "GPTNeoX": {
        "hidden_size": 64,
        "intermediate_size": 83,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
        "attn_implementation": "eager",  # captured attentions
    },
    "GPTNeoXJapanese": {
        "hidden_size": 64,
        "intermediate_multiple_size": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 32,
    },
}
_DROPOUTS = {
    "GPTNeo": ("attention_dropout", "resid_dropout", "embed_dropout", "classifier_dropout"),
    "GPTJ": ("attn_pdrop", "resid_pdrop", "embd_pdrop"),
    "GPTNeoX": ("attention_dropout", "hidden_dropout", "classifier_dropout"),
    "GPTNeoXJapanese": ("attention_dropout", "hidden_dropout"),
}
_NEOX = ("query_key_value", "attention.dense.", "dense_h_to_4h", "dense_4h_to_h", "embed_in")
_NAMES = {
    "GPTNeo": ("q_proj", "out_proj", "c_fc", "wte"),
    "GPTJ": ("q_proj", "out_proj", "fc_in", "wte"),
    "GPTNeoX": _NEOX,
    "GPTNeoXJapanese": _NEOX,
}
_REFUSED = {
    "GPTNeo": {"num_heads": 7, "hidden_size": 56},
    "GPTJ": {"n_head": 7, "n_embd": 56, "rotary_dim": 4},
    "GPTNeoX": {"num_attention_heads": 1},
    "GPTNeoXJapanese": {"num_attention_heads": 1},
}
#: Before transformers 5.24 its attention was computed in one way, by itself.
_GPTJ_LOOKS_UP = hasattr(modeling_gptj, "ALL_ATTENTION_FUNCTIONS")
_RANKS = {"GPTNeoX": (1, 2, 3, 4), "GPTNeoXJapanese": (1, 2, 3, 4)}


def build(family: str, head: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of a family; ``options`` change its configuration."""
    dropouts = dict.fromkeys(_DROPOUTS[family], dropout)
    labels = {"num_labels": 2} if head == "ForQuestionAnswering" else {}  # GPT-J takes it for starts and ends
    model_class = getattr(transformers, f"{family}{head}")
    return tiny(model_class, seed=seed, **{**_COMMON, **_SIZES[family], **dropouts, **labels, **options})


def _case(family: str, head: str, **fields: Any) -> Case:
    outputs = {"Model": ("last_hidden_state",), "ForQuestionAnswering": ("start_logits", "end_logits")}
    settings: dict[str, Any] = {
        "build": partial(build, family, head),
        "inputs": text_batch,
        "outputs": outputs.get(head, ("logits",)),
        "sharded": _NAMES[family],
        "refuses": (_REFUSED[family],),
        "supports": Supports(
            tensor_parallel=_RANKS.get(family, (1, 2, 4)),
            sequence=True,
            context=family == "GPTNeoX" or (family == "GPTJ" and _GPTJ_LOOKS_UP),
            captured=("attentions", "hidden_states"),
            generation=head == "ForCausalLM",
            checkpointing=family != "GPTNeoXJapanese",
        ),
        **({"loss": hidden_loss} if head == "Model" else {}),
        **fields,
    }
    return Case(name=f"{family}{head}", **settings)


def cases() -> list[Case]:
    """Return a case for every class."""
    heads = ("ForCausalLM", "Model", "ForSequenceClassification", "ForQuestionAnswering")
    switches = {
        "attn_implementation": ("eager", "sdpa"),
        "use_parallel_residual": (True, False),
        "tie_word_embeddings": (False, True),
    }
    ways = {"attn_implementation": ("eager", "sdpa") if _GPTJ_LOOKS_UP else ("eager",)}
    return [
        *(_case("GPTNeo", head) for head in (*heads, "ForTokenClassification")),
        *(_case("GPTJ", head, options=ways) for head in heads),
        _case("GPTNeoX", "ForCausalLM", options=switches),
        *(_case("GPTNeoX", head) for head in (*heads[1:], "ForTokenClassification")),
        *(_case("GPTNeoXJapanese", head) for head in heads[:2]),
    ]
