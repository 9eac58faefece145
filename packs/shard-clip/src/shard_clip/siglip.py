"""How SigLIP is sharded, 1 and 2: the towers are those of CLIP, and attention of a learned probe pools the images."""

from __future__ import annotations

from typing import Any

from transformers.models.siglip import modeling_siglip
from typing_extensions import override

from shard_clip.towers import TowerPolicy, captured, text, vision
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import calls, region, replicate
from shardcore_transformers import PretrainedPolicy

#: Early releases wrap each tower once more where it is used alone, and capture outputs there.
_WRAPPED = hasattr(modeling_siglip, "SiglipTextTransformer")
_INSIDE: list[Rule] = [] if _WRAPPED else [captured()]


def _text(tower: Any) -> ModulePolicy:
    return text(tower, replicate("head"), *_INSIDE)


def _vision(tower: Any) -> ModulePolicy:
    pooling = [
        replicate("head.probe", "head.attention", "head.layernorm", optional=True),
        region(enter="head.mlp", col="head.mlp.fc1", row="head.mlp.fc2", optional=True),
    ]
    return vision(tower, *pooling, *_INSIDE, end="post_layernorm")


class SiglipPolicy(PretrainedPolicy):
    """Both towers, compared with each other: every rank has the whole batch, so it judges every pair of it."""

    stages = Stages(
        first="vision_model.embeddings",
        blocks=("vision_model.encoder.layers", "text_model.encoder.layers"),
        between=("vision_model.post_layernorm", "vision_model.head", "text_model.embeddings"),
        last=("text_model.final_layer_norm", "text_model.head", "logit_scale", "logit_bias"),
        optional="vision_model.head",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of both towers and of what compares them."""
        compared = [replicate("logit_scale", "logit_bias"), calls("get_text_features", "get_image_features")]
        return {**_text(self.model.text_model), **_vision(self.model.vision_model), self.model: compared}


class _TowerPolicy(TowerPolicy):
    @override
    def heads(self) -> ModulePolicy:
        around = [captured(f"{self.inside}.")] if _WRAPPED else []
        return {name: [*rules, *around] for name, rules in super().heads().items()}


class SiglipTextPolicy(_TowerPolicy):
    """The tower of text alone."""

    tower = "text_model"
    stages = Stages(first="embeddings", blocks="encoder.layers", last=("final_layer_norm", "head"))

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower."""
        return {**_text(self.base), **self.heads()}


class SiglipVisionPolicy(_TowerPolicy):
    """The tower of images alone, or with a label for each."""

    tower = "vision_model"
    stages = Stages(first="embeddings", blocks="encoder.layers", last=("post_layernorm", "head"), optional="head")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its head."""
        return {**_vision(self.base), **self.heads()}
