"""How CLIP is sharded: the towers of `shard_clip.towers`, alone or together, and what uses them."""

from __future__ import annotations

from typing import ClassVar

from shard_clip.towers import TEXT, TEXT_STAGES, VISION, VISION_STAGES, WRAPPED
from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import calls, replicate
from shardcore_transformers import PretrainedPolicy

__all__ = [
    "CLIPForImageClassificationPolicy",
    "CLIPModelPolicy",
    "CLIPTextModelPolicy",
    "CLIPTextModelWithProjectionPolicy",
    "CLIPVisionModelPolicy",
    "CLIPVisionModelWithProjectionPolicy",
]


class CLIPModelPolicy(PretrainedPolicy):
    """Both towers, compared with each other: every rank has the whole batch, so it contrasts every pair of it."""

    stages = Stages(
        first=("vision_model.embeddings", "vision_model.pre_layrnorm"),
        blocks=("vision_model.encoder.layers", "text_model.encoder.layers"),
        between=("vision_model.post_layernorm", "visual_projection", "text_model.embeddings"),
        last=("text_model.final_layer_norm", "text_projection", "logit_scale"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of both towers and of what compares them."""
        compared = replicate("visual_projection", "text_projection", "logit_scale")
        return {**TEXT, **VISION, "CLIPModel": [compared, calls("get_text_features", "get_image_features")]}


class CLIPTextModelPolicy(PretrainedPolicy):
    """The tower of text alone."""

    stages = TEXT_STAGES.under("text_model") if WRAPPED else TEXT_STAGES
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its head."""
        return {**TEXT, **self.rules}


class CLIPTextModelWithProjectionPolicy(CLIPTextModelPolicy):
    """The tower of text, projected to where both towers meet."""

    stages = TEXT_STAGES.under("text_model", then="text_projection")
    rules: ClassVar[ModulePolicy] = {"CLIPTextModelWithProjection": [replicate("text_projection")]}


class CLIPVisionModelPolicy(PretrainedPolicy):
    """The tower of images alone."""

    stages = VISION_STAGES.under("vision_model") if WRAPPED else VISION_STAGES
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its head."""
        return {**VISION, **self.rules}


class CLIPVisionModelWithProjectionPolicy(CLIPVisionModelPolicy):
    """The tower of images, projected to where both towers meet."""

    stages = VISION_STAGES.under("vision_model", then="visual_projection")
    rules: ClassVar[ModulePolicy] = {"CLIPVisionModelWithProjection": [replicate("visual_projection")]}


class CLIPForImageClassificationPolicy(CLIPVisionModelPolicy):
    """The tower of images with a label for each."""

    stages = VISION_STAGES.under("vision_model", then="classifier")
    rules: ClassVar[ModulePolicy] = {"CLIPForImageClassification": [replicate("classifier")]}
