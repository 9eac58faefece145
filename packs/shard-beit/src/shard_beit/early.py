"""The layers of BEiT in early releases of transformers, with the names of BERT's."""

from __future__ import annotations

from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, by_heads, local_heads, per_rank, region

__all__ = ["ATTENTION", "BACKBONE", "SHARED", "STAGES"]

_SELF = "attention.attention"

ATTENTION: list[Rule] = [
    region(
        enter=_SELF,
        col=(f"{_SELF}.query", f"{_SELF}.key", f"{_SELF}.value"),
        row="attention.output.dense",
        unit="head",
    ),
    attribute(f"{_SELF}.num_attention_heads", local_heads),
    attribute(f"{_SELF}.all_head_size", per_rank),
    by_heads(f"{_SELF}.relative_position_bias.relative_position_bias_table", dim=1, optional=True),
    region(col="intermediate.dense", row="output.dense"),
]
SHARED: ModulePolicy = {
    "BeitEncoder": [by_heads("relative_position_bias.relative_position_bias_table", dim=1, optional=True)]
}
STAGES = Stages(
    first=("embeddings", "encoder.relative_position_bias"),
    blocks="encoder.layer",
    last=("layernorm", "pooler"),
    optional=("encoder.relative_position_bias", "layernorm", "pooler"),
)
BACKBONE = Stages(
    first=("embeddings", "encoder.relative_position_bias"),
    blocks="encoder.layer",
    last=("fpn1", "fpn2"),
    optional=("encoder.relative_position_bias", "fpn1", "fpn2"),
)
