"""How ViT of transformers is sharded, and what each head adds; `shard_vit.before59` has its layers before 5.9."""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import norm, outputs, region, replicate, sequence
from shardcore_transformers import PretrainedPolicy

__all__ = [
    "ViTForImageClassificationPolicy",
    "ViTForMaskedImageModelingPolicy",
    "ViTModelPolicy",
]

_LAYER: tuple[Rule, ...] = (
    norm("layernorm_before", "layernorm_after"),
    region(
        enter="attention",
        col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        row="attention.o_proj",
        unit="head",
    ),
    region(col="mlp.fc1", row="mlp.fc2"),
)


class ViTModelPolicy(PretrainedPolicy):
    """The encoder without a head."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first="embeddings", blocks="layers", last=("layernorm", "pooler"))
    layer: ClassVar[tuple[Rule, ...]] = _LAYER
    blocks: ClassVar[str] = "layers"

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder."""
        return {
            "ViTEmbeddings": [replicate("")],
            "ViTLayer": self.layer,
            "ViTModel": [
                sequence(scatter=f"{self.blocks}[0]", gather="layernorm", attention="attention"),
                norm("layernorm"),
                replicate("pooler", optional=True),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
        }


class ViTForImageClassificationPolicy(ViTModelPolicy):
    """The encoder with a label for each image."""

    stages = ViTModelPolicy.stages.under("vit", then="classifier")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and the classifier."""
        return {**super().module_policy(), "ViTForImageClassification": [replicate("classifier")]}


class ViTForMaskedImageModelingPolicy(ViTModelPolicy):
    """The encoder with a decoder for the pixels of masked patches."""

    stages = ViTModelPolicy.stages.under("vit", then="decoder")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and the decoder."""
        return {**super().module_policy(), "ViTForMaskedImageModeling": [replicate("decoder")]}
