"""Tiny decoders with mixers of several kinds for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

from shard_llama.cases import build, decoder_cases, mixture_cases
from shardcore_testing import Case

_ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "embed_tokens")
#: Before it the classes below handed no logits of their routers on.
_HANDS_ON_ROUTERS = Version(transformers.__version__) >= Version("5.23.0rc0")
_ROUTED: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 21}


def mixture(name: str, *, experts: str = "eager", **options: Any) -> Any:
    """Return a tiny mixture of the class ``name``; ``experts`` is how it runs them."""
    model = build(name, **{**_ROUTED, **options})
    model.config._experts_implementation = experts  # the default multiplies in no float64
    return model


def _delta_nets() -> list[Case]:
    usual: dict[str, Any] = {
        "head_dim": 16,
        "layer_types": ["full_attention", "linear_attention"],
        # There are more heads of values than of keys, and they are of another size.
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 6,
        "linear_value_head_dim": 5,
        "shared_expert_intermediate_size": 23,
    }
    fields: dict[str, Any] = {
        "usual": usual,
        "context": False,
        "shared": {"linear_num_key_heads": 2},
        "tolerance": 1e-10,  # keys are divided by their norms: a step of AdamW is rounded more than a gradient
    }
    split = (*_ATTENTION, "linear_attn.out_proj")
    fused = (*split, "linear_attn.in_proj_qkv")
    routed = {**fields, "build": mixture, "whole": ("gate",), "collectives": (2, 5)}
    return [
        *decoder_cases("Qwen3_5", prefix="qwen3_5_", headless="Qwen3_5Text", sharded=fused, **fields),
        *mixture_cases(
            "Qwen3_5Moe", prefix="qwen3_5moe_", headless="Qwen3_5MoeText", sharded=(*fused, "experts"), **routed
        ),
        *mixture_cases(
            "Qwen3Next", prefix="qwen3next_", sharded=(*split, "linear_attn.in_proj_qkvz", "experts"), **routed
        ),
    ]


def _convolutions() -> list[Case]:
    usual: dict[str, Any] = {"layer_types": ["full_attention", "conv"], "conv_bias": True, "num_dense_layers": 1}
    split = (*_ATTENTION, "conv.in_proj", "conv.out_proj", "feed_forward.w1")
    fields: dict[str, Any] = {"usual": usual, "context": False, "dropout": False}
    return [
        *decoder_cases("Lfm2", prefix="lfm2_", sharded=split, collectives=(2, 3), **fields),
        *mixture_cases(
            "Lfm2Moe",
            prefix="lfm2moe_",
            build=mixture,
            captured=_HANDS_ON_ROUTERS,
            sharded=(*split, "experts"),
            whole=("gate",),
            collectives=(2, 4),
            **fields,
        ),
    ]


def _state_spaces() -> list[Case]:
    # Heads of a width of 16 in one group; where KV heads are shared, there is a group for each rank of up to four.
    usual: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 6, "mamba_chunk_size": 4, "mamba_proj_bias": True}
    shared = {"mamba_n_groups": 4}
    split = (*_ATTENTION, "mamba.in_proj", "mamba.out_proj")
    fields: dict[str, Any] = {"context": False, "shared": shared}
    granite: dict[str, Any] = {
        **usual,
        "layer_types": ["full_attention", "linear_attention"],
        "shared_intermediate_size": 23,
        "num_local_experts": 5,
        "position_embedding_type": "rope",
    }
    return [
        *decoder_cases(
            "Bamba",
            prefix="bamba_",
            usual={**usual, "attn_layer_indices": [1]},
            sharded=(*split, "feed_forward.gate_proj"),
            **fields,
        ),
        *decoder_cases(
            "FalconH1",
            prefix="falconh1_",
            usual={
                **usual,
                "mamba_d_ssm": 80,
                "mamba_d_head": 10,
                "ssm_multipliers": [0.5, 0.75, 1.25, 1.5, 2.0],
                "mlp_multipliers": [0.5, 1.5],
                "projectors_bias": True,
            },
            sharded=(*split, "feed_forward.gate_proj"),
            **{**fields, "shared": {**shared, "mamba_rms_norm": True}},
        ),
        *mixture_cases(
            "GraniteMoeHybrid",
            prefix="granitemoehybrid_",
            usual=granite,
            build=mixture,
            captured=_HANDS_ON_ROUTERS,
            sharded=(*split, "shared_mlp.input_linear", "experts"),
            whole=("router",),
            **fields,
        ),
    ]


def cases() -> list[Case]:
    """Return the cases of every family, dense and with experts."""
    return [*_delta_nets(), *_convolutions(), *_state_spaces()]
