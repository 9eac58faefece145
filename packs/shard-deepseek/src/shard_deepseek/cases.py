"""Tiny DeepSeeks for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from packaging.version import Version

import shard_llama.cases
from shard_llama.cases import decoder_cases
from shardcore_testing import Case

_RELEASE = Version(transformers.__version__)

_SIZES: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 14,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 21,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}
#: Before, each expert was a module of its own, which no rank has alone.
_TOGETHER = Version("5.0.0rc0") <= _RELEASE
#: Before, routing within groups of experts read an attribute that DeepSeek-V2 did not have.
_ROUTING = "group_limited_greedy" if Version("5.17.0") <= _RELEASE else "greedy"
_LAYER = ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj", "experts", "embed_tokens")


def build(name: str, *, experts: str = "eager", **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``experts`` is how those of transformers 5 run."""
    model = shard_llama.cases.build(name, **{**_SIZES, **options})
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = experts  # the default multiplies in no float64
    for name, parameter in model.named_parameters():
        if ".indexer." in name:
            parameter.requires_grad_(False)  # it selects, and is not trained with the model
    return model


def _cases(family: str, shared: dict[str, Any] | None = None, **fields: Any) -> list[Case]:
    """Return the cases of a family; in the tied one the first block has an MLP, and queries have no latent states."""
    prefix = f"{family.lower()}_"
    first = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "num_hidden_layers": 3}
    settings: dict[str, Any] = {
        "sizes": (1, 2, 3, 4),
        "sharded": _LAYER,
        # What two linears make enters; the gradients of their norms are summed, and of the router's weight.
        "collectives": (2, 5),
        "whole": ("gate", "q_a_proj", "kv_a_proj_with_mqa"),
        "refuses": ({"num_attention_heads": 1, "num_key_value_heads": 1},),
        **fields,
    }
    found = decoder_cases(
        family, prefix=prefix, shared={**first, **(shared or {"q_lora_rank": None})}, build=build, **settings
    )
    together = _TOGETHER and "experts" in settings["sharded"]
    found = [replace(case, supports=replace(case.supports, experts=together)) for case in found]
    latent = "q_lora_rank" not in (shared or {"q_lora_rank": None})
    tied = {"name": f"{prefix}tied"} if latent else {"name": f"{prefix}tied", "sharded": ("q_proj",)}
    whole = settings["whole"] if latent else tuple(name for name in settings["whole"] if name != "q_a_proj")
    return [replace(c, whole=whole, **tied) if c.name == f"{prefix}tied_shared_kv" else c for c in found]


#: No block has experts.
_DENSE: dict[str, Any] = {
    "sharded": ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.o_proj", "mlp.up_proj", "embed_tokens"),
    "whole": ("q_a_proj", "kv_a_proj_with_mqa"),
    "collectives": (2, 4),
}
#: The experts, and the one that every token visits, are each a region of its own.
_ALONE: dict[str, Any] = {
    "sharded": (*_LAYER, "shared_experts"),
    "collectives": (3, 6),
}
#: Each token sees 4 of those before it.
_SELECTED: dict[str, Any] = {
    "usual": {"index_topk": 4, "index_head_dim": 12, "index_n_heads": 3},
    "whole": ("gate", "q_a_proj", "kv_a_proj_with_mqa", "indexer"),
    "context": False,
    "shared": {"num_hidden_layers": 3},
    "collectives": (2, 4),
}


def _latest() -> list[Case]:
    """Return the cases of families that came after DeepSeek-V3."""
    some = {"mlp_layer_types": ["sparse", "sparse"]}
    first = {"mlp_layer_types": ["dense", "sparse", "sparse"], "q_lora_rank": None}
    every = {"indexer_types": ["full", "shared"], **_SELECTED["usual"]}
    alone = _cases("AXK1", usual=some, shared={"n_group": 1, "mlp_layer_types": first["mlp_layer_types"]}, **_ALONE)
    return [
        *(replace(c, supports=replace(c.supports, sequence=False, context=False)) for c in alone),
        *_cases("DeepseekV32", **_SELECTED),
        *_cases("GlmMoeDsa", **{**_SELECTED, "usual": every, "shared": {"indexer_types": ["full", "shared", "full"]}}),
        *_cases("Glm4MoeLite", usual=some, shared=first),
        *_cases("Mistral4"),
        *_cases("MiniCPM3", **_DENSE),
        # Where it reads a checkpoint transformers forgets the row of the word that fills up.
        *_cases("Youtu", usual={"pad_token_id": None}, **_DENSE),
    ]


def cases() -> list[Case]:
    """Return the cases of DeepSeek, and of what is built like it."""
    second = [] if not _TOGETHER else _cases("DeepseekV2", usual={"topk_method": _ROUTING})
    return [*second, *_cases("DeepseekV3"), *(_latest() if Version("5.17.0") <= _RELEASE else [])]
