"""Tiny GLMs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from typing import Any

from shard_llama.cases import decoder_cases
from shardcore_testing import Case

_LAYER = ("q_proj", "v_proj", "o_proj", "mlp.gate_up_proj", "mlp.down_proj", "embed_tokens")
_FIELDS: dict[str, Any] = {
    "usual": {"head_dim": 16},
    "sharded": _LAYER,
    "sizes": (1, 2, 3, 4),
    "refuses": ({"num_attention_heads": 1, "num_key_value_heads": 1},),
}


def cases() -> list[Case]:
    """Return the cases of GLM and GLM-4."""
    return [*decoder_cases("Glm", prefix="glm_", **_FIELDS), *decoder_cases("Glm4", prefix="glm4_", **_FIELDS)]
