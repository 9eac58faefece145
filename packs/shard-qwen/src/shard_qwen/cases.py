"""Tiny Qwens for the conformance kit (`shardcore.testing`)."""

from __future__ import annotations

from typing import Any

from shard_llama.cases import decoder_cases
from shardcore.testing import Case

__all__ = ["cases"]

#: Qwen2's projections of queries, keys and values have biases, whatever the configuration says; its MLP has none.
_SIZES: dict[str, Any] = {"head_dim": 16, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}


def cases() -> list[Case]:
    """Return the cases of Qwen2 and Qwen3, each with a layer that sees a window of the tokens only."""
    window = {"use_sliding_window": True, **_SIZES}
    return [
        *decoder_cases("Qwen2", prefix="qwen2_", usual=window),
        # The norms on queries and keys have partial gradients: two collectives more in the backward.
        *decoder_cases("Qwen3", prefix="qwen3_", usual=window, collectives=(2, 4)),
    ]
