"""The words that rules of a policy are written with.

    "LlamaDecoderLayer": [
        norm("input_layernorm", "post_attention_layernorm"),
        region(enter="mlp", col=("mlp.gate_proj", "mlp.up_proj"), row="mlp.down_proj"),
    ]

All names are relative to the module that the rule is listed under; ``""`` is that module itself. A module that is too
small to give every rank a part is replicated instead; everything else that cannot be split is reported when the plan is
compiled.
A new word is a constructor in a module of this folder, which returns a `shardcore.policy.Word`.
"""

from __future__ import annotations

from shardcore.styles.columns import segments
from shardcore.styles.conditions import layer_drop, refuse, when_divisible
from shardcore.styles.heads import attention, norm_over_heads, slice_arg
from shardcore.styles.layers import (
    attribute,
    col,
    local_groups,
    local_heads,
    local_kv_heads,
    norm,
    partial,
    per_rank,
    replicate,
    row,
    shared_numpy,
    shared_rng,
    vocab,
)
from shardcore.styles.local import by_heads
from shardcore.styles.mixtures import experts
from shardcore.styles.models import calls, delegate, head, loss, outputs
from shardcore.styles.regions import enter_arg, region
from shardcore.styles.sequences import sequence

__all__ = [
    "attention",
    "attribute",
    "by_heads",
    "calls",
    "col",
    "delegate",
    "enter_arg",
    "experts",
    "head",
    "layer_drop",
    "local_groups",
    "local_heads",
    "local_kv_heads",
    "loss",
    "norm",
    "norm_over_heads",
    "outputs",
    "partial",
    "per_rank",
    "refuse",
    "region",
    "replicate",
    "row",
    "segments",
    "sequence",
    "shared_numpy",
    "shared_rng",
    "slice_arg",
    "vocab",
    "when_divisible",
]
