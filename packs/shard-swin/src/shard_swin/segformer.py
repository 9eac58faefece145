"""How SegFormer is sharded: stages that attend to fewer tokens than they have, with a convolution in each MLP."""

from __future__ import annotations

from typing import Any

from shard_swin.stages import HeadsOfStages, shared
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import by_heads, norm, region, replicate
from shardcore_transformers import BaseModelPolicy


class SegformerPolicy(BaseModelPolicy):
    """The stages, with a head for the label of an image or of each pixel, or without."""

    checks = (HeadsOfStages("config.num_attention_heads", uneven=True),)
    labels = ("classifier", "decode_head")
    stages = Stages(blocks="stages")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the stages, of their layers, and of a head."""
        layers = [layer for stage in self.base.stages for layer in stage.blocks]
        return {
            "SegformerStage": [replicate("patch_embeddings"), norm("layer_norm")],
            **{layer: self.layer(layer) for layer in layers},
            **self.heads(),
        }

    def layer(self, layer: Any) -> list[Rule]:
        """Return the rules of one layer: keys and values may come from a convolution, which all heads read."""
        reduction = "attention.sequence_reduction"
        read = [f"{reduction}.sequence_reduction", f"{reduction}.layer_norm"]
        attention = region(
            enter="attention",
            col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            row="attention.o_proj",
            heads=Heads(layer.attention.num_attention_heads, uneven=True),
            partial=tuple(read) if hasattr(layer.attention, "sequence_reduction") else (),
        )
        mlp = (region(col="mlp.fc1", row="mlp.fc2"), by_heads("mlp.dwconv.dwconv"))
        return [
            norm("layernorm_before", "layernorm_after"),
            shared("attention.num_attention_heads", attention, uneven=True),
            shared("mlp.fc1.out_features", *mlp, whole="mlp"),
        ]
