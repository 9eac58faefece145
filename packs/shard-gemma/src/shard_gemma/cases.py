"""Tiny Gemmas for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from packaging.version import Version

import shard_llama.cases
from shard_llama.cases import decoder_cases
from shardcore_testing import Case

_HANDS_ON_ROUTERS = Version(transformers.__version__) >= Version("5.19.0rc0")


def build(name: str, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``options`` change its configuration.

    Norms before Gemma 3n multiply by 1 + weight: their weights lie around 0, where those of others lie around 1.
    """
    model = shard_llama.cases.build(name, **options)
    if name.startswith(("Gemma3n", "Gemma4")):
        model.config._experts_implementation = "eager"  # the default multiplies in no float64
        return model
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in type(module).__name__:
                module.weight.sub_(1)
    return model


_FIELDS: dict[str, Any] = {
    "build": build,
    "sizes": (1, 2, 3, 4),
    "refuses": ({"num_attention_heads": 1, "num_key_value_heads": 1},),
}
_GEMMA: dict[str, Any] = {"head_dim": 16, "tie_word_embeddings": False}
#: One layer sees a window of the tokens; logits are capped where they are large.
_LAYERS = {
    **_GEMMA,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "query_pre_attn_scalar": 16,
    "final_logit_softcapping": 2.0,
}
#: Only the attention that is written out caps its scores.
_CAPPED = {**_LAYERS, "attn_logit_softcapping": 2.0, "attn_implementation": "eager"}
#: Heads of the last kind of layers are wider.
_FOURTH = {**_LAYERS, "global_head_dim": 24, "hidden_size_per_layer_input": 0}
#: And fewer, and their keys are their values.
_ALIKE = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_MIXTURE = {**_FOURTH, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 21}
#: The last two layers read keys and values of those before them.
_READERS = {
    **_LAYERS,
    "num_hidden_layers": 4,
    "layer_types": _LAYERS["layer_types"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 101,
}
_SMALL = {**_READERS, "global_head_dim": 24, "use_double_wide_mlp": True}
_WHOLE = ("per_layer", "laurel", "altup")
#: Four streams of states; the first MLP cuts its gates off.
_STREAMS = {**_READERS, "laurel_rank": 6, "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0]}


def _together(found: list[Case], **fields: Any) -> list[Case]:
    """Return cases in which tokens stay together."""
    supports = {"sequence": False, "context": False, **fields}
    return [replace(case, supports=replace(case.supports, **supports)) for case in found]


def _fourth() -> list[Case]:
    """Return the cases of Gemma 4 and Gemma 3n."""
    fields: dict[str, Any] = {"headless": "Gemma4Text", "collectives": (2, 3), **_FIELDS}
    streams: dict[str, Any] = {
        "headless": "Gemma3nText",
        "whole": (*_WHOLE, "layers.0.mlp"),
        "collectives": (2, 3),
        **_FIELDS,
    }
    small = decoder_cases("Gemma4", prefix="gemma4_small_", usual=_SMALL, whole=_WHOLE, **fields)
    mixture = decoder_cases(
        "Gemma4", prefix="gemma4_mixture_", usual=_MIXTURE, whole=("router",), **{**fields, "collectives": (3, 5)}
    )
    captured = ("attentions", "hidden_states", *(("router_logits",) if _HANDS_ON_ROUTERS else ()))
    # Keys and values go past the blocks between: no stage sends them on, and reentrant checkpoints lose their gradient,
    # in the unsharded model too, with which dropout would be compared.
    past = {"pipeline": False, "dropout": False}
    return [
        *decoder_cases("Gemma4", prefix="gemma4_", usual=_FOURTH, shared=_ALIKE, **fields),
        *_together(small[:1], **past),
        *_together(mixture[:1], experts=True, captured=captured),
        *_together(decoder_cases("Gemma3n", prefix="gemma3n_", usual=_STREAMS, **streams), **past),
    ]


def cases() -> list[Case]:
    """Return the cases of Gemma and of its generations."""
    return [
        *decoder_cases("Gemma", prefix="gemma_", usual=_GEMMA, **_FIELDS),
        *decoder_cases("Gemma2", prefix="gemma2_", usual=_CAPPED, options={}, **_FIELDS),
        # The norms on queries and keys have partial gradients: one collective more in the backward.
        *decoder_cases("Gemma3", headless="Gemma3Text", prefix="gemma3_", usual=_LAYERS, collectives=(2, 3), **_FIELDS),
        *_fourth(),
    ]
