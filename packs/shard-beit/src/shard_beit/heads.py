"""What each head adds to BEiT, and BEiT as a backbone."""

from __future__ import annotations

from typing import ClassVar

from shard_beit import early
from shard_beit.policy import IS_EARLY, MODEL, STAGES, BeitModelPolicy
from shardcore.policy import ModulePolicy, Rule
from shardcore.styles import norm, replicate

#: What makes features of several sizes.
_PYRAMID = ("fpn1", "fpn2") if IS_EARLY else ("fpn",)
_FEATURES: list[Rule] = [replicate(*_PYRAMID, optional=True)]


class BeitForImageClassificationPolicy(BeitModelPolicy):
    """The encoder with a label for each image."""

    stages = STAGES.under("beit", then="classifier")
    rules: ClassVar[ModulePolicy] = {"BeitForImageClassification": [replicate("classifier")]}


class BeitForMaskedImageModelingPolicy(BeitModelPolicy):
    """The encoder with a visual token for each masked patch."""

    stages = STAGES.under("beit", then=("layernorm", "lm_head"))
    rules: ClassVar[ModulePolicy] = {"BeitForMaskedImageModeling": [norm("layernorm"), replicate("lm_head")]}


class BeitForSemanticSegmentationPolicy(BeitModelPolicy):
    """The encoder with a label for each pixel, made of the features of four layers."""

    stages = STAGES.under("beit", then=(*_PYRAMID, "decode_head", "auxiliary_head"), optional="auxiliary_head")
    rules: ClassVar[ModulePolicy] = {
        "BeitForSemanticSegmentation": [
            replicate(*_PYRAMID, "decode_head"),
            replicate("auxiliary_head", optional=True),
        ]
    }


class BeitBackbonePolicy(BeitModelPolicy):
    """The encoder as a backbone, with the features of some of its layers."""

    stages = early.BACKBONE if IS_EARLY else STAGES.under("beit", then=_PYRAMID, optional=_PYRAMID)
    rules: ClassVar[ModulePolicy] = {"BeitBackbone": _FEATURES}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and its features; an early backbone is the model itself."""
        found = dict(super().module_policy())
        if IS_EARLY:
            del found["BeitModel"]
            found["BeitBackbone"] = [*MODEL, *_FEATURES]
        return found
