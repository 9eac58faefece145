"""Tiny Llamas for the conformance kit (`shardcore_testing`), and tiny decoders of families that are built like it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import transformers

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a model of the class ``name`` with the sizes of a tiny Llama; ``options`` change them."""
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
    return tiny(getattr(transformers, name), seed=seed, **settings)


_ATTENTION = {"attn_implementation": ("sdpa", "eager")}
_LAYER = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj", "embed_tokens")
_REFUSED = ({"num_attention_heads": 7, "num_key_value_heads": 7, "hidden_size": 56},)


def _head(name: str) -> str:
    return name.rpartition("For")[2] if "For" in name else ""


def _case(name: str, kind: str, *, build: Callable[..., Any], **fields: Any) -> Case:
    outputs = {"": ("last_hidden_state",), "QuestionAnswering": ("start_logits", "end_logits")}
    settings: dict[str, Any] = {
        "inputs": text_batch,
        "outputs": outputs.get(_head(kind), ("logits",)),
        "options": _ATTENTION,
        "sharded": _LAYER,
        "refuses": _REFUSED,
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def decoder_cases(
    family: str,
    *,
    prefix: str = "",
    usual: dict[str, Any] | None = None,
    shared: dict[str, Any] | None = None,
    headless: str = "",
    sizes: tuple[int, ...] = (1, 2, 4),
    dropout: bool = True,
    context: bool = True,
    build: Callable[..., Any] = build,
    **fields: Any,
) -> list[Case]:
    """Return a case for every class of a family, and for what decoders differ in: shared KV heads, tied vocabularies.

    Args:
        family: what the names of its classes begin with, such as ``"Qwen2"``.
        prefix: of the names of the cases, for a pack that serves several families.
        usual: values of the configuration that are not Llama's.
        shared: values of the case with shared KV heads, beyond ``usual``; by default there are two KV heads.
        headless: what the names of classes without a language-model head begin with, where that differs.
        sizes: numbers of ranks; where heads may be uneven, 3 too.
        dropout: the configuration has it.
        context: context parallelism may compute the attention.
        build: makes the models, as `build` does.
        **fields: further fields of every `Case`.
    """
    usual = usual or {}
    captured = ("attentions", "hidden_states")
    plain = Supports(sequence=True, context=context, captured=captured, dropout=dropout, tensor_parallel=sizes)
    generating = replace(plain, generation=True)
    tied = {**usual, "num_key_value_heads": 2, "tie_word_embeddings": True, "vocab_size": 97, **(shared or {})}
    fields = {"collectives": (2, 2), **fields, "build": build}
    causal, others = f"{family}ForCausalLM", headless or family
    found = [
        _case(
            f"{prefix}causal_lm",
            causal,
            usual=usual,
            **{"supports": generating, "sharded": (*_LAYER, "lm_head"), **fields},
        ),
        _case(
            f"{prefix}tied_shared_kv",
            causal,
            usual=tied,
            **{"supports": generating, "sharded": ("q_proj",), **fields},
        ),
        _case(f"{prefix}model", f"{others}Model", usual=usual, loss=hidden_loss, **{"supports": plain, **fields}),
    ]
    for head in ("sequence_classification", "token_classification", "question_answering"):
        kind = f"{others}For{head.title().replace('_', '')}"
        if hasattr(transformers, kind):
            found.append(_case(f"{prefix}{head}", kind, usual=usual, **{"supports": plain, **fields}))
    return found


def mixture_cases(
    family: str, *, prefix: str, together: bool = True, captured: bool = True, **fields: Any
) -> list[Case]:
    """Return the cases of `decoder_cases` for a family with experts.

    Args:
        family: as in `decoder_cases`.
        prefix: as in `decoder_cases`.
        together: replicas can share the experts: they are one module.
        captured: the decoder and its language model return the logits of routers; what classifies does not.
        **fields: as in `decoder_cases`.
    """
    handed_on = tuple(f"{prefix}{kind}" for kind in ("causal_lm", "tied_shared_kv", "model") if captured)
    routed = ("attentions", "hidden_states", "router_logits")
    return [
        replace(
            case,
            supports=replace(
                case.supports,
                experts=together or "sliced",
                captured=routed if case.name in handed_on else case.supports.captured,
            ),
        )
        for case in decoder_cases(family, prefix=prefix, **fields)
    ]


def cases() -> list[Case]:
    """Return the cases of Llama."""
    return decoder_cases("Llama")
