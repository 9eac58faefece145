"""How Swin V2 is sharded: cosine attention with a scale for each head, and biases that a network makes of positions."""

from __future__ import annotations

from typing import ClassVar

from shard_swin.early import HEADS, layer
from shard_swin.stages import HeadsOfStages, stage_attentions
from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import by_heads, norm, partial, replicate
from shardcore_transformers import PretrainedPolicy

_BIASES = "attention.self.continuous_position_bias_mlp"
_LAYER = layer(
    by_heads("attention.self.logit_scale", heads=HEADS),
    partial(f"{_BIASES}.0"),
    by_heads(f"{_BIASES}.2", heads=HEADS),
)


class Swinv2ModelPolicy(PretrainedPolicy):
    """The stages without a head."""

    checks = (HeadsOfStages("config.num_heads"),)
    stages = Stages(first="embeddings", blocks="encoder.layers", last="layernorm")
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {"Swinv2Model": [norm("layernorm")]}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the stages, of what merges patches between them, and of a head."""
        return {
            "Swinv2Embeddings": [replicate("")],
            "Swinv2Layer": _LAYER,
            "Swinv2PatchMerging": [norm("norm"), replicate("reduction")],
            "Swinv2Stage": [stage_attentions(HEADS)],
            **self.rules,
        }


class Swinv2ForImageClassificationPolicy(Swinv2ModelPolicy):
    """The stages with a label for each image."""

    stages = Swinv2ModelPolicy.stages.under("swinv2", then="classifier")
    rules: ClassVar[ModulePolicy] = {
        **Swinv2ModelPolicy.rules,
        "Swinv2ForImageClassification": [replicate("classifier")],
    }


class Swinv2ForMaskedImageModelingPolicy(Swinv2ModelPolicy):
    """The stages with a decoder for the pixels of masked patches."""

    stages = Swinv2ModelPolicy.stages.under("swinv2", then="decoder")
    rules: ClassVar[ModulePolicy] = {
        **Swinv2ModelPolicy.rules,
        "Swinv2ForMaskedImageModeling": [replicate("decoder")],
    }


class Swinv2BackbonePolicy(Swinv2ModelPolicy):
    """The stages as a backbone, which returns what each of them makes."""

    stages = Stages(first="embeddings", blocks="encoder.layers")
    rules: ClassVar[ModulePolicy] = {}
