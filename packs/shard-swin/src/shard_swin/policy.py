"""How Swin is sharded: each stage has heads of its own number, and attends in windows of the image."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.swin import modeling_swin

from shard_swin import early
from shard_swin.stages import HeadsOfStages, shared, stage_attentions
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, by_heads, norm, per_rank, region, replicate
from shardcore_transformers import PretrainedPolicy

#: In early releases of transformers layers have other names.
IS_EARLY = hasattr(modeling_swin, "SwinSelfAttention")
_HEADS = "attention.num_attention_heads"

_LAYER: list[Rule] = [
    norm("layernorm_before", "layernorm_after"),
    shared(
        _HEADS,
        region(
            enter="attention",
            col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
            row="attention.o_proj",
            heads=_HEADS,
        ),
        attribute(_HEADS, per_rank),
        by_heads("attention.relative_position_bias.relative_position_bias_table", dim=1, heads=_HEADS),
    ),
    region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
]
_BLOCKS: ModulePolicy = early.BLOCKS if IS_EARLY else {"SwinLayer": _LAYER, "SwinEncoder": [stage_attentions(_HEADS)]}


class SwinModelPolicy(PretrainedPolicy):
    """The stages without a head."""

    checks = (HeadsOfStages("config.num_heads"),)
    stages = Stages(first="embeddings", blocks="encoder.layers", last="layernorm")
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the stages, of what merges patches between them, and of a head."""
        return {
            **_BLOCKS,
            "SwinEmbeddings": [replicate("")],
            "SwinPatchMerging": [norm("norm"), replicate("reduction")],
            "SwinModel": [norm("layernorm", optional=IS_EARLY)],  # an early backbone is no model
            **self.rules,
        }


class SwinForImageClassificationPolicy(SwinModelPolicy):
    """The stages with a label for each image."""

    stages = SwinModelPolicy.stages.under("swin", then="classifier")
    rules: ClassVar[ModulePolicy] = {"SwinForImageClassification": [replicate("classifier")]}


class SwinForMaskedImageModelingPolicy(SwinModelPolicy):
    """The stages with a decoder for the pixels of masked patches."""

    stages = SwinModelPolicy.stages.under("swin", then="decoder")
    rules: ClassVar[ModulePolicy] = {"SwinForMaskedImageModeling": [replicate("decoder")]}


class SwinBackbonePolicy(SwinModelPolicy):
    """The stages as a backbone, with a norm for each whose features are returned."""

    stages = (
        Stages(first="embeddings", blocks="encoder.layers", last="hidden_states_norms")
        if IS_EARLY
        else SwinModelPolicy.stages.under("swin", then="hidden_states_norms")
    )
    rules: ClassVar[ModulePolicy] = {"SwinBackbone": [replicate("hidden_states_norms")]}
