"""Tiny decoders with mixers of several kinds for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
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


def _single_mixers() -> list[Case]:
    usual: dict[str, Any] = {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "moe", "linear_attention"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 10,
        "ssm_state_size": 6,
        "n_groups": 1,
        "chunk_size": 4,
        "use_bias": True,
        "mlp_bias": False,  # with experts there is none
        "head_dim": 16,
        "n_routed_experts": 5,
        "moe_shared_expert_intermediate_size": 23,
        "moe_latent_size": 20,
    }
    ends_with_experts = ["moe", "linear_attention", "full_attention", "mlp", "moe"]
    split = ("embeddings", "mixer.q_proj", "mixer.v_proj", "mixer.in_proj", "mixer.out_proj", "mixer.up_proj")
    return mixture_cases(
        "NemotronH",
        prefix="nemotronh_",
        usual=usual,
        shared={"n_groups": 4, "moe_latent_size": None, "layers_block_type": ends_with_experts},
        build=mixture,
        captured=_HANDS_ON_ROUTERS,
        sharded=(*split, "experts"),
        whole=("gate", "latent_proj"),
        context=False,
    )


def _second_mambas() -> list[Case]:
    usual: dict[str, Any] = {"num_heads": 8, "head_dim": 16, "state_size": 6, "n_groups": 1, "chunk_size": 4}
    found = decoder_cases(
        "Mamba2",
        prefix="mamba2_",
        usual={**usual, "use_bias": True, "tie_word_embeddings": False, "attn_implementation": "eager"},
        shared={"n_groups": 4},
        sharded=("embeddings", "mixer.in_proj", "mixer.out_proj"),
        options={},
        collectives=(1, 3),
        refuses=({"num_heads": 7, "hidden_size": 56},),
        context=False,
        dropout=False,
    )
    return [replace(case, supports=replace(case.supports, captured=("hidden_states",))) for case in found]


def _first_mambas() -> list[Case]:
    usual: dict[str, Any] = {
        "num_hidden_layers": 3,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "mamba_d_state": 6,
        "mamba_dt_rank": 5,
        "mamba_proj_bias": True,
    }
    return mixture_cases(
        "Jamba",
        prefix="jamba_",
        usual=usual,
        build=mixture,
        sharded=(*_ATTENTION, "mamba.in_proj", "mamba.x_proj", "mamba.out_proj", "feed_forward.up_proj", "experts"),
        whole=("router",),
        tolerance=1e-11,  # a step of AdamW is rounded more than a gradient
        collectives=(3, 5),
        context=False,
    )


def _shared_blocks() -> list[Case]:
    # One shared block is used twice; in the second case there are two, of which the first is used again.
    usual: dict[str, Any] = {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "n_mamba_heads": 8,
        "mamba_d_state": 6,
        "chunk_size": 4,
        "add_bias_linear": True,
        "use_shared_attention_adapter": True,
        "adapter_rank": 6,
        "use_mem_rope": True,
    }
    two: dict[str, Any] = {
        "layers_block_type": ["hybrid", "hybrid", "hybrid"],
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": False,
        "use_mem_rope": False,
        "mamba_ngroups": 4,
    }
    found = decoder_cases(
        "Zamba2",
        prefix="zamba2_",
        usual=usual,
        shared=two,
        sharded=(*_ATTENTION, "mamba.in_proj", "feed_forward.gate_up_proj", "gate_up_proj_adapter_list"),
        whole=("layers.0.linear", "layers.1.linear", "layers.2.linear", "adapter_list"),
        collectives=(4, 9),
        context=False,
        tolerance=1e-8,  # powers of powers: a step of AdamW is rounded more than a gradient
    )
    # Blocks read the words beside the states; reentrant checkpoints of blocks lie inside of each other.
    return [replace(c, supports=replace(c.supports, sequence=False, reentrant=False)) for c in found]


def _lightning() -> list[Case]:
    usual: dict[str, Any] = {
        "layer_types": ["full_attention", "linear_attention"],
        "block_size": 3,  # tokens fill two of them, and a part of one more
        "num_local_experts": 5,
        "head_dim": 12,
        "linear_attn_alpha_factor": 0.5,
        "linear_attn_beta_factor": 1.5,
        "full_attn_beta_factor": 0.75,
        "mlp_alpha_factor": 1.25,
    }
    return mixture_cases(
        "MiniMax",
        prefix="minimax_",
        usual=usual,
        build=mixture,
        sharded=(*_ATTENTION, "self_attn.qkv_proj", "self_attn.output_gate", "self_attn.out_proj", "experts"),
        whole=("gate",),
        collectives=(3, 6),
        refuses=({"num_attention_heads": 7, "num_key_value_heads": 7}, {"router_jitter_noise": 0.1}),
        context=False,
    )


def cases() -> list[Case]:
    """Return the cases of every family, dense and with experts."""
    first = _first_mambas() if _HANDS_ON_ROUTERS else []
    return [
        *_delta_nets(),
        *_convolutions(),
        *_state_spaces(),
        *_single_mixers(),
        *_second_mambas(),
        *_shared_blocks(),
        *_lightning(),
        *first,
    ]
