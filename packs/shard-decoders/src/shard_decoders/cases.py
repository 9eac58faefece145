"""Tiny decoders for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import shard_llama.cases
from shard_llama.cases import decoder_cases, mixture_cases
from shardcore_testing import Case

_ATTENTION = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "embed_tokens")
_UNGATED = (*_ATTENTION, "mlp.up_proj", "mlp.down_proj")
#: One layer sees a window of the tokens only.
_WINDOW: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

#: What is not Llama's, by what the names of classes begin with.
_FAMILIES: dict[str, dict[str, Any]] = {
    # Each kind of norms on queries and keys is a collective more, and so is an activation that is learned.
    "Apertus": {"sharded": _UNGATED, "collectives": (2, 4)},
    "Arcee": {"sharded": _UNGATED},
    # Norms of heads are not shared by ranks that share a head.
    "Cohere": {"usual": {"logit_scale": 0.5, "use_qk_norm": True}, "shared": {"use_qk_norm": False}},
    "Cohere2": {"usual": {**_WINDOW, "logit_scale": 0.5}},
    "Cwm": {"usual": {**_WINDOW, "head_dim": 16}},
    "Ernie4_5": {"usual": {"head_dim": 16}, "dropout": False},
    "Exaone4": {"usual": {**_WINDOW, "head_dim": 16}, "collectives": (2, 3)},
    "Granite": {
        "usual": {
            "embedding_multiplier": 2.0,
            "logits_scaling": 3.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.3,
        }
    },
    "Helium": {"usual": {"head_dim": 16}},
    "HunYuanDenseV1": {"usual": {"head_dim": 16}, "collectives": (2, 3)},
    "HyperCLOVAX": {"usual": {"use_post_norm": True, "head_dim": 16}},
    "Jais2": {"sharded": _UNGATED},
    "Nemotron": {"sharded": _UNGATED},
    "Olmo": {},
    "Olmo2": {"collectives": (4, 6)},
    "Olmo3": {"usual": _WINDOW, "collectives": (4, 6)},
    "SeedOss": {"usual": {"head_dim": 16}},
    "SmolLM3": {"usual": {"no_rope_layers": [1, 0]}},
    "Starcoder2": {"sharded": (*_ATTENTION, "mlp.c_fc", "mlp.c_proj")},
}

_ROUTED = (*_ATTENTION, "experts")
#: The first block has an MLP.
_FIRST: dict[str, Any] = {"first_k_dense_replace": 1, "moe_layer_start_index": 1, "num_hidden_layers": 3}

#: The same of those with experts. The gradient of a router's weight is a collective more.
_MIXTURES: dict[str, dict[str, Any]] = {
    "Afmoe": {
        "usual": {
            **_WINDOW,
            "num_experts": 5,
            "num_shared_experts": 1,
            "moe_intermediate_size": 21,
            "num_dense_layers": 0,
            "head_dim": 16,
        },
        "shared": {"num_dense_layers": 1},
        "whole": ("router",),
        "collectives": (2, 4),
    },
    "Dots1": {
        "usual": {
            "n_routed_experts": 5,
            "n_shared_experts": 1,
            "moe_intermediate_size": 21,
            "first_k_dense_replace": 0,
            "norm_topk_prob": True,
        },
        "shared": _FIRST,
        "collectives": (2, 4),
        "captured": False,
    },
    "Ernie4_5_Moe": {
        "usual": {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_num_shared_experts": 1,
            "moe_intermediate_size": 21,
            "moe_layer_start_index": 0,
        },
        "shared": _FIRST,
        "dropout": False,
    },
    "ExaoneMoe": {
        "usual": {
            "num_experts": 5,
            "num_shared_experts": 1,
            "moe_intermediate_size": 21,
            "mlp_layer_types": ["sparse", "sparse"],
            "head_dim": 16,
            **_WINDOW,
        },
        "collectives": (2, 4),
        "captured": False,
    },
    "FlexOlmo": {"usual": {"num_experts": 5}, "collectives": (4, 7)},
    "Glm4Moe": {
        "usual": {
            "n_routed_experts": 5,
            "moe_intermediate_size": 21,
            "first_k_dense_replace": 0,
            "head_dim": 16,
            "use_qk_norm": True,
        },
        "shared": {**_FIRST, "use_qk_norm": False},
        "collectives": (2, 4),
        "captured": False,
    },
    # Only the attention that is written out has sinks.
    "GptOss": {
        "usual": {
            "num_local_experts": 5,
            "intermediate_size": 44,
            "head_dim": 16,
            **_WINDOW,
            "attn_implementation": "eager",
        },
        "options": {},
        "context": False,
        "together": False,  # they have biases
        "whole": ("router",),
    },
    # A step of AdamW is rounded more than a gradient.
    "GraniteMoe": {"usual": {"num_local_experts": 5}, "whole": ("router",), "tolerance": 1e-11},
    "HYV3": {
        "usual": {
            "mlp_bias": False,
            "num_experts": 5,
            "num_shared_experts": 1,
            "moe_intermediate_size": 21,
            "mlp_layer_types": ["sparse", "sparse"],
            "head_dim": 16,
        },
        "collectives": (2, 4),
        "captured": False,
    },
    "HunYuanMoEV1": {
        "usual": {"num_experts": 5, "moe_topk": 2, "head_dim": 16},
        "collectives": (2, 4),
        "captured": False,
    },
    # One layer has experts and positions, and sees chunks of the tokens; the other one has neither.
    "Llama4": {
        "headless": "Llama4Text",
        "usual": {
            "num_local_experts": 5,
            "head_dim": 16,
            "intermediate_size": 21,
            "intermediate_size_mlp": 83,
            "moe_layers": [0],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 4,
            "floor_scale": 3,
        },
        "context": False,
        "together": False,  # the experts are given each token scaled, in the place of its routing
        "whole": ("router",),
    },
    "Mellum": {
        "usual": {"num_experts": 5, "moe_intermediate_size": 21, "head_dim": 16, **_WINDOW},
        "collectives": (2, 4),
    },
    "MiniMaxM2": {"usual": {"num_local_experts": 5, "head_dim": 16}, "collectives": (4, 7)},
    # The second layer sees those two pairs of tokens that a head beside each KV head has chosen.
    "MiniMaxM3VL": {
        "headless": "MiniMaxM3VLText",
        "usual": {
            "num_local_experts": 5,
            "intermediate_size": 21,
            "dense_intermediate_size": 83,
            "shared_intermediate_size": 23,
            "mlp_layer_types": ["sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "head_dim": 16,
            "rotary_dim": 8,
            "index_n_heads": 4,
            "index_head_dim": 12,
            "index_block_size": 2,
            "index_topk_blocks": 2,
            "swiglu_limit": 0.5,
        },
        "shared": {
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "index_n_heads": 2,
        },
        "sharded": (*_ROUTED, "indexer.q_proj", "shared_experts.gate_up_proj"),
        "whole": ("mlp.gate", "indexer.k_proj"),
        "refuses": ({"num_attention_heads": 7, "num_key_value_heads": 7, "index_n_heads": 7}, {"index_n_heads": 2}),
        "collectives": (3, 5),
        "context": False,
    },
    "Olmoe": {"usual": {"num_experts": 5}, "collectives": (4, 7)},
    "SolarOpen": {
        "usual": {"n_routed_experts": 5, "n_shared_experts": 1, "moe_intermediate_size": 21, "head_dim": 16},
        "captured": False,
    },
}


def build(name: str, *, dropout: float = 0.0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``options`` change its configuration."""
    dropouts = dict.fromkeys(("residual_dropout", "embedding_dropout"), dropout)
    return shard_llama.cases.build(name, dropout=dropout, **{**dropouts, **options})


def mixture(name: str, *, experts: str = "eager", **options: Any) -> Any:
    """Return a tiny mixture of the class ``name``; ``experts`` is how it runs them."""
    model = build(name, **{"num_experts_per_tok": 2, **options})
    model.config._experts_implementation = experts  # the default multiplies in no float64
    for part, parameter in model.named_parameters():
        if ".indexer." in part:
            parameter.requires_grad_(False)  # it chooses, and is not trained with the model
    return model


def cases() -> list[Case]:
    """Return the cases of every family, dense and with experts."""
    found = [
        case
        for family, fields in _FAMILIES.items()
        for case in decoder_cases(family, prefix=f"{family.lower()}_", build=build, **fields)
    ]
    fields = {"build": mixture, "sharded": _ROUTED, "whole": ("gate",), "collectives": (2, 3)}
    for family, own in _MIXTURES.items():
        found += mixture_cases(family, prefix=f"{family.lower()}_", **{**fields, **own})
    # Tokens are not split where experts are a region alone, to which they are given as rows.
    whole = [replace(c.supports, sequence=c.supports.sequence and "minimaxm3" not in c.name) for c in found]
    return [replace(case, supports=supports) for case, supports in zip(found, whole, strict=True)]
