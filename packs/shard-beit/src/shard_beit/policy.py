"""How BEiT is sharded: a bias for each head and each distance in the image, and what each head of the model adds."""

from __future__ import annotations

from typing import ClassVar

from transformers.models.beit import modeling_beit

from shard_beit import early
from shardcore.integrations.transformers import PretrainedPolicy
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import by_heads, norm, outputs, region, replicate

__all__ = [
    "IS_EARLY",
    "BeitBackbonePolicy",
    "BeitForImageClassificationPolicy",
    "BeitForMaskedImageModelingPolicy",
    "BeitForSemanticSegmentationPolicy",
    "BeitModelPolicy",
]

#: In early releases of transformers layers have other names, and attention makes its bias by itself.
IS_EARLY = hasattr(modeling_beit, "BeitSelfAttention")

_TABLE = "relative_position_bias_table"
_ATTENTION: list[Rule] = [
    region(
        enter="attention",
        local=("attention_mask",),  # with the bias for the heads of this rank
        col=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        row="attention.o_proj",
        unit="head",
    ),
    by_heads(f"relative_position_bias.{_TABLE}", dim=1, optional=True),
    region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
]
_LAYER: list[Rule] = [
    norm("layernorm_before", "layernorm_after"),
    *(early.ATTENTION if IS_EARLY else _ATTENTION),
    replicate("lambda_1", "lambda_2", optional=True),
]
_SHARED = by_heads(f"shared_position_bias.{_TABLE}", dim=1, optional=True)
_MODEL: list[Rule] = [
    *([] if IS_EARLY else [_SHARED]),
    replicate("layernorm", "pooler", optional=True),
    outputs(attentions="heads"),
]
_STAGES = (
    early.STAGES
    if IS_EARLY
    else Stages(
        first=("embeddings", "shared_position_bias"),
        blocks="layers",
        last=("layernorm", "pooler"),
        optional=("shared_position_bias", "layernorm", "pooler"),
    )
)
#: What makes features of several sizes.
_PYRAMID = ("fpn1", "fpn2") if IS_EARLY else ("fpn",)
_FEATURES: list[Rule] = [replicate(*_PYRAMID, optional=True)]


class BeitModelPolicy(PretrainedPolicy):
    """The encoder without a head."""

    checks = (Heads("num_attention_heads"),)
    stages = _STAGES
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder, of the bias that its layers may share, and of a head."""
        return {
            "BeitEmbeddings": [replicate("")],
            "BeitLayer": _LAYER,
            **(early.SHARED if IS_EARLY else {}),
            "BeitModel": _MODEL,
            **self.rules,
        }


class BeitForImageClassificationPolicy(BeitModelPolicy):
    """The encoder with a label for each image."""

    stages = _STAGES.under("beit", then="classifier")
    rules: ClassVar[ModulePolicy] = {"BeitForImageClassification": [replicate("classifier")]}


class BeitForMaskedImageModelingPolicy(BeitModelPolicy):
    """The encoder with a visual token for each masked patch."""

    stages = _STAGES.under("beit", then=("layernorm", "lm_head"))
    rules: ClassVar[ModulePolicy] = {"BeitForMaskedImageModeling": [norm("layernorm"), replicate("lm_head")]}


class BeitForSemanticSegmentationPolicy(BeitModelPolicy):
    """The encoder with a label for each pixel, made of the features of four layers."""

    stages = _STAGES.under("beit", then=(*_PYRAMID, "decode_head", "auxiliary_head"), optional="auxiliary_head")
    rules: ClassVar[ModulePolicy] = {
        "BeitForSemanticSegmentation": [
            replicate(*_PYRAMID, "decode_head"),
            replicate("auxiliary_head", optional=True),
        ]
    }


class BeitBackbonePolicy(BeitModelPolicy):
    """The encoder as a backbone, with the features of some of its layers."""

    stages = early.BACKBONE if IS_EARLY else _STAGES.under("beit", then=_PYRAMID, optional=_PYRAMID)
    rules: ClassVar[ModulePolicy] = {"BeitBackbone": _FEATURES}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and its features; an early backbone is the model itself."""
        found = dict(super().module_policy())
        if IS_EARLY:
            del found["BeitModel"]
            found["BeitBackbone"] = [*_MODEL, *_FEATURES]
        return found
