"""Tiny Qwens for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version

import shard_llama.cases
from shard_llama.cases import decoder_cases, mixture_cases
from shardcore_testing import Case

_OLD = Version(transformers.__version__) < Version("5.0.0rc0")

#: Qwen2's projections of queries, keys and values have biases, whatever the configuration says; its MLP has none.
_SIZES: dict[str, Any] = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}

_MIXTURE: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 21,
    "shared_expert_intermediate_size": 23,
    "decoder_sparse_step": 1,
}
_LAYER = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "experts", "embed_tokens")


def mixture(name: str, *, experts: str = "eager", **options: Any) -> Any:
    """Return a tiny mixture of the class ``name``; ``experts`` is how those of transformers 5 run."""
    model = shard_llama.cases.build(name, **{**_MIXTURE, **options})
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = experts  # the default multiplies in no float64
    return model


def _mixtures(family: str, collectives: tuple[int, int]) -> list[Case]:
    """Return the cases of a family with experts; where KV heads are shared, its first block has an MLP."""
    return mixture_cases(
        family,
        prefix=f"{family.lower()}_",
        together=not _OLD,  # each was a module of its own
        usual={"head_dim": 16},
        shared={"mlp_only_layers": [0], "num_hidden_layers": 3},
        build=mixture,
        sharded=_LAYER,
        whole=("gate",),
        collectives=collectives,
    )


def cases() -> list[Case]:
    """Return the cases of Qwen2 and Qwen3, each with a layer that sees a window of the tokens only, and of mixtures."""
    window = {"use_sliding_window": True, **_SIZES}
    return [
        *decoder_cases("Qwen2", prefix="qwen2_", usual=window),
        # The norms on queries and keys have partial gradients: one collective more in the backward.
        *decoder_cases("Qwen3", prefix="qwen3_", usual=window, collectives=(2, 3)),
        # The gradient of a router's weight is summed by itself, and that of the shared expert's gate.
        *([] if _OLD else _mixtures("Qwen2Moe", (2, 4))),
        *_mixtures("Qwen3Moe", (2, 4)),
    ]
