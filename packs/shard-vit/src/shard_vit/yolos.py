"""How YOLOS is sharded: a ViT in the early layout, whose last tokens are what it detects."""

from __future__ import annotations

from typing_extensions import override

from shard_vit.before59 import OldViTPolicy
from shardcore.policy import Rule, Stages
from shardcore.styles import norm, outputs, replicate


class YolosPolicy(OldViTPolicy):
    """The encoder with its heads or without. What is added between blocks has all tokens, so they stay whole there."""

    labels = ("class_labels_classifier", "bbox_predictor")
    stages = Stages(
        first="embeddings",
        blocks="encoder.layer",
        last=("layernorm", "pooler"),
        everywhere=("encoder.interpolation", "encoder.mid_position_embeddings"),
        optional="encoder.mid_position_embeddings",  # later releases have it in the former
    )

    @override
    def encoder(self) -> list[Rule]:
        if not self.model.config.use_mid_position_embeddings:
            return super().encoder()
        return [
            norm("layernorm"),
            replicate("encoder.interpolation"),
            replicate("encoder.mid_position_embeddings", "pooler", optional=True),
            outputs(attentions="heads"),
        ]
