"""How CLIP is sharded: the towers of `shard_clip.towers`, alone or compared with each other."""

from __future__ import annotations

from shard_clip.towers import CLIPTextPolicy, CLIPVisionPolicy, captured, text, vision
from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import calls, replicate
from shardcore_transformers import PretrainedPolicy

__all__ = ["CLIPPolicy", "CLIPTextPolicy", "CLIPVisionPolicy"]


class CLIPPolicy(PretrainedPolicy):
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
        return {
            **text(self.model.text_model, captured()),
            **vision(self.model.vision_model, *CLIPVisionPolicy.own, end="encoder.layers[-1]"),
            self.model: [compared, calls("get_text_features", "get_image_features")],
        }
