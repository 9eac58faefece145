"""Tiny Phis for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import shard_llama.cases
from shard_llama.cases import decoder_cases
from shardcore_testing import Case


def build(name: str, *, dropout: float = 0.0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; ``options`` change its configuration."""
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop"), dropout)
    return shard_llama.cases.build(name, dropout=dropout, **{**dropouts, "partial_rotary_factor": 0.5, **options})


_FIELDS: dict[str, Any] = {
    "build": build,
    "sizes": (1, 2, 3, 4),
    "refuses": ({"num_attention_heads": 1, "num_key_value_heads": 1},),
}


def cases() -> list[Case]:
    """Return the cases of Phi, once with norms on queries and keys, and of Phi-3."""
    phi = ("q_proj", "v_proj", "dense", "mlp.fc1", "mlp.fc2", "embed_tokens")
    phi3 = ("qkv_proj", "o_proj", "mlp.gate_up_proj", "mlp.down_proj", "embed_tokens")
    found = [
        *decoder_cases("Phi", prefix="phi_", shared={"qk_layernorm": True}, sharded=phi, **_FIELDS),
        *decoder_cases("Phi3", prefix="phi3_", sharded=phi3, **_FIELDS),
    ]
    # The gradients of norms of local heads are summed in two more collectives.
    return [replace(case, collectives=(2, 4)) if case.name == "phi_tied_shared_kv" else case for case in found]
