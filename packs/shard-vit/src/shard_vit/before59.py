"""How ViT of transformers before 5.9 is sharded: other names, and attributes that count heads."""

from __future__ import annotations

from shard_vit.policy import ViTForImageClassificationPolicy, ViTForMaskedImageModelingPolicy, ViTModelPolicy
from shardcore.policy import Rule, Stages
from shardcore.styles import attribute, local_heads, norm, per_rank, region

__all__ = [
    "OldViTForImageClassificationPolicy",
    "OldViTForMaskedImageModelingPolicy",
    "OldViTModelPolicy",
]

_OLD_LAYER: tuple[Rule, ...] = (
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
)


class OldViTModelPolicy(ViTModelPolicy):
    """The encoder without a head, before transformers 5.9."""

    stages = Stages(first="embeddings", blocks="encoder.layer", last=("layernorm", "pooler"))
    layer = _OLD_LAYER
    blocks = "encoder.layer"


class OldViTForImageClassificationPolicy(ViTForImageClassificationPolicy):
    """The encoder with a label for each image, before transformers 5.9."""

    stages = OldViTModelPolicy.stages.under("vit", then="classifier")
    layer = _OLD_LAYER
    blocks = "encoder.layer"


class OldViTForMaskedImageModelingPolicy(ViTForMaskedImageModelingPolicy):
    """The encoder with a decoder for the pixels of masked patches, before transformers 5.9."""

    stages = OldViTModelPolicy.stages.under("vit", then="decoder")
    layer = _OLD_LAYER
    blocks = "encoder.layer"
