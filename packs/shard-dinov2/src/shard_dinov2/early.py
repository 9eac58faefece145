"""The blocks of DINOv2 in early releases of transformers: names of BERT, and gates in one linear."""

from __future__ import annotations

from shardcore.policy import Rule
from shardcore.styles import attribute, local_heads, per_rank, region, segments

ATTENTION: list[Rule] = [
    region(
        enter="attention.attention",
        col=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        row="attention.output.dense",
        unit="head",
    ),
    attribute("attention.attention.num_attention_heads", local_heads),
    attribute("attention.attention.all_head_size", per_rank),
]
GATED = region(enter="mlp", col=segments("mlp.weights_in", 2), row="mlp.weights_out", optional=True)
