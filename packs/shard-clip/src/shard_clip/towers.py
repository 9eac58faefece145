"""The rules of CLIP's two towers, each with heads of its own number; SigLIP has the same layers."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, norm, outputs, per_rank, region, replicate, sequence, vocab
from shardcore_transformers import BaseModelPolicy

LAYER: list[Rule] = [
    norm("layer_norm1", "layer_norm2"),
    region(
        enter="self_attn",
        col=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        row="self_attn.out_proj",
        heads="self_attn.num_heads",
    ),
    attribute("self_attn.num_heads", per_rank),
    region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
]


def captured(tower: str = "") -> Rule:
    """Return the rule for what is captured of a tower, by the class that captures it."""
    return outputs(attentions="heads", hidden_states="sequence", heads=f"{tower}encoder.layers.0.self_attn.num_heads")


def text(tower: Any, *rules: Rule) -> ModulePolicy:
    """Return the rules of a tower of text; ``rules`` are its own."""
    split = sequence(scatter="encoder.layers[0]", gather="final_layer_norm")
    return {
        type(tower.encoder.layers[0]): LAYER,
        tower.embeddings: [vocab("token_embedding"), replicate("position_embedding")],
        tower: [norm("final_layer_norm"), split, *rules],
    }


def vision(tower: Any, *rules: Rule, end: str) -> ModulePolicy:
    """Return the rules of a tower of images, whose tokens are whole again behind ``end``; ``rules`` are its own."""
    return {
        type(tower.encoder.layers[0]): LAYER,
        tower.embeddings: [replicate("")],
        tower: [norm("post_layernorm"), sequence(scatter="encoder.layers[0]", gather=end), *rules],
    }


class TowerPolicy(BaseModelPolicy):
    """One tower, with a head or without."""

    #: The name of the tower in what is around it.
    tower: ClassVar[str]
    words = ()
    labels = ("classifier", "text_projection", "visual_projection")

    @property
    @override
    def inside(self) -> str:
        return self.tower if hasattr(self.model, self.tower) else ""


class CLIPTextPolicy(TowerPolicy):
    """The tower of text alone, or projected to where both towers meet."""

    tower = "text_model"
    stages = Stages(first="embeddings", blocks="encoder.layers", last="final_layer_norm")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its head."""
        return {**text(self.base, captured()), **self.heads()}


class CLIPVisionPolicy(TowerPolicy):
    """The tower of images alone, projected to where both towers meet, or with a label for each."""

    tower = "vision_model"
    stages = Stages(first=("embeddings", "pre_layrnorm"), blocks="encoder.layers", last="post_layernorm")
    #: Only the first token is normalized behind the layers.
    own: ClassVar[tuple[Rule, ...]] = (norm("pre_layrnorm"), captured())

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its head."""
        return {**vision(self.base, *self.own, end="encoder.layers[-1]"), **self.heads()}
