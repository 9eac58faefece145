"""How ViT of transformers before 5.9 is sharded: other names, and attributes that count heads."""

from __future__ import annotations

from typing import ClassVar

from shard_vit.policy import ViTPolicy
from shardcore.policy import Rule, Stages
from shardcore.styles import attribute, local_heads, norm, per_rank, region


class OldViTPolicy(ViTPolicy):
    """The encoder with a head or without, before transformers 5.9."""

    stages = Stages(first="embeddings", blocks="encoder.layer", last=("layernorm", "pooler"))
    blocks: ClassVar[str] = "encoder.layer"

    def block(self) -> list[Rule]:
        """Return the rules of one block."""
        return [
            norm("layernorm_before", "layernorm_after"),
            region(
                enter="attention.attention",
                col=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
                row="attention.output.dense",
                unit="head",
            ),
            attribute("attention.attention.num_attention_heads", local_heads),
            attribute("attention.attention.all_head_size", per_rank),
            region(col="intermediate.dense", row="output.dense"),
        ]
