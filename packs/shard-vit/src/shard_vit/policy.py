"""How ViT of transformers is sharded: its layers before and after transformers 5.9, and what each head adds."""

from __future__ import annotations

from typing import ClassVar

from shardcore.integrations.transformers import PretrainedPolicy
from shardcore.policy import Heads, ModulePolicy, Row, Stages
from shardcore.styles import attribute, local_heads, norm, outputs, per_rank, region, replicate, sequence

__all__ = [
    "OldViTForImageClassificationPolicy",
    "OldViTForMaskedImageModelingPolicy",
    "OldViTModelPolicy",
    "ViTForImageClassificationPolicy",
    "ViTForMaskedImageModelingPolicy",
    "ViTModelPolicy",
]

_LAYER: tuple[Row, ...] = (
    norm("layernorm_before", "layernorm_after"),
    region(
        enter="attention",
        col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        row="attention.o_proj",
        unit="head",
    ),
    region(col="mlp.fc1", row="mlp.fc2"),
)
_OLD_LAYER: tuple[Row, ...] = (
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


class ViTModelPolicy(PretrainedPolicy):
    """The encoder without a head."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first="embeddings", blocks="layers", last="layernorm")
    layer: ClassVar[tuple[Row, ...]] = _LAYER
    blocks: ClassVar[str] = "layers"

    def module_policy(self) -> ModulePolicy:
        """Return the rows of the encoder."""
        return {
            "ViTEmbeddings": [replicate("")],
            "ViTLayer": self.layer,
            "ViTModel": [
                sequence(scatter=f"{self.blocks}[0]", gather="layernorm"),
                norm("layernorm"),
                replicate("pooler", optional=True),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
        }


class ViTForImageClassificationPolicy(ViTModelPolicy):
    """The encoder with a label for each image."""

    stages = ViTModelPolicy.stages.under("vit", then="classifier")

    def module_policy(self) -> ModulePolicy:
        """Return the rows of the encoder and the classifier."""
        return {**super().module_policy(), "ViTForImageClassification": [replicate("classifier")]}


class ViTForMaskedImageModelingPolicy(ViTModelPolicy):
    """The encoder with a decoder for the pixels of masked patches."""

    stages = ViTModelPolicy.stages.under("vit", then="decoder")

    def module_policy(self) -> ModulePolicy:
        """Return the rows of the encoder and the decoder."""
        return {**super().module_policy(), "ViTForMaskedImageModeling": [replicate("decoder")]}


class OldViTModelPolicy(ViTModelPolicy):
    """The encoder without a head, before transformers 5.9."""

    stages = Stages(first="embeddings", blocks="encoder.layer", last="layernorm")
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
