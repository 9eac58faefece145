"""How ViT of transformers is sharded, and what is built like it; `shard_vit.before59` has its layers before 5.9."""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import norm, outputs, region, replicate, sequence
from shardcore_transformers import BaseModelPolicy


class ViTPolicy(BaseModelPolicy):
    """The encoder with a head or without: labels of an image, or the pixels of masked patches."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first="embeddings", blocks="layers", last=("layernorm", "pooler"), optional="pooler")
    blocks: ClassVar[str] = "layers"
    #: The attention that context parallelism may compute.
    divided: ClassVar[str | tuple[str, ...]] = "attention"
    labels: ClassVar[tuple[str, ...]] = ("classifier", "cls_classifier", "distillation_classifier", "decoder")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and of its head."""
        return {
            self.base.embeddings: [replicate("")],
            type(self.base.get_submodule(f"{self.blocks}.0")): self.block(),
            self.base: self.encoder(),
            **self.heads(),
        }

    def encoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        return [
            sequence(scatter=f"{self.blocks}[0]", gather="layernorm", attention=self.divided),
            norm("layernorm"),
            replicate("pooler", optional=True),
            outputs(attentions="heads", hidden_states="sequence"),
        ]

    def block(self) -> list[Rule]:
        """Return the rules of one block."""
        return [
            norm("layernorm_before", "layernorm_after"),
            region(
                enter="attention",
                col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
                row="attention.o_proj",
                heads="attention.num_attention_heads",
            ),
            region(col="mlp.fc1", row="mlp.fc2"),
        ]
