"""Tiny DeepSeeks for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import transformers
from packaging.version import Version

import shard_llama.cases
from shard_llama.cases import decoder_cases
from shardcore_testing import Case

__all__ = ["build", "cases"]

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
    return model


def _cases(family: str, **usual: Any) -> list[Case]:
    """Return the cases of a family; in the tied one the first block has an MLP, and queries have no latent states."""
    prefix = f"{family.lower()}_"
    found = decoder_cases(
        family,
        prefix=prefix,
        usual=usual,
        shared={"num_key_value_heads": 4, "first_k_dense_replace": 1, "num_hidden_layers": 3, "q_lora_rank": None},
        sizes=(1, 2, 3, 4),
        build=build,
        sharded=_LAYER,
        # What two linears make enters; the gradients of their norms are summed, and of the router's weight.
        collectives=(2, 5),
        whole=("gate", "q_a_proj", "kv_a_proj_with_mqa"),
        refuses=({"num_attention_heads": 1, "num_key_value_heads": 1},),
    )
    found = [replace(case, supports=replace(case.supports, experts=_TOGETHER)) for case in found]
    return [
        replace(case, name=f"{prefix}tied", sharded=("q_proj",), whole=("gate", "kv_a_proj_with_mqa"))
        if case.name == f"{prefix}tied_shared_kv"
        else case
        for case in found
    ]


def cases() -> list[Case]:
    """Return the cases of DeepSeek-V2 and DeepSeek-V3."""
    second = [] if not _TOGETHER else _cases("DeepseekV2", topk_method=_ROUTING)
    return [*second, *_cases("DeepseekV3")]
