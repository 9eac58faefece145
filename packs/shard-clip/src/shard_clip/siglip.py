"""How SigLIP is sharded: the towers are those of CLIP, and attention of a learned probe pools the images."""

from __future__ import annotations

from transformers.models.siglip import modeling_siglip

from shard_clip.towers import LAYER, captured
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import calls, norm, region, replicate, sequence, vocab
from shardcore_transformers import PretrainedPolicy

#: Early releases wrap each tower once more where it is used alone, and capture outputs there.
_WRAPPED = hasattr(modeling_siglip, "SiglipTextTransformer")
_TOWER = "Transformer" if _WRAPPED else "Model"
_INSIDE = [] if _WRAPPED else [captured()]

_TEXT: ModulePolicy = {
    "SiglipEncoderLayer": LAYER,
    "SiglipTextEmbeddings": [vocab("token_embedding"), replicate("position_embedding")],
    f"SiglipText{_TOWER}": [
        norm("final_layer_norm"),
        replicate("head"),
        sequence(scatter="encoder.layers[0]", gather="final_layer_norm"),
        *_INSIDE,
    ],
}
_VISION: ModulePolicy = {
    "SiglipEncoderLayer": LAYER,
    "SiglipVisionEmbeddings": [replicate("")],
    f"SiglipVision{_TOWER}": [
        norm("post_layernorm"),
        sequence(scatter="encoder.layers[0]", gather="post_layernorm"),
        *_INSIDE,
    ],
    "SiglipMultiheadAttentionPoolingHead": [
        replicate("probe", "attention", "layernorm", optional=True),
        region(enter="mlp", col="mlp.fc1", row="mlp.fc2", optional=True),
    ],
}
_TEXT_STAGES = Stages(first="embeddings", blocks="encoder.layers", last=("final_layer_norm", "head"))
_VISION_STAGES = Stages(first="embeddings", blocks="encoder.layers", last=("post_layernorm", "head"), optional="head")


def _around(tower: ModulePolicy, name: str, prefix: str, *rules: Rule) -> ModulePolicy:
    """Return the rules of a tower, and those of the class around it, which captures outputs in early releases."""
    around = [*rules, captured(prefix)] if _WRAPPED else [*rules]
    return {**tower, name: around} if around else tower


class SiglipModelPolicy(PretrainedPolicy):
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
        return {**_TEXT, **_VISION, "SiglipModel": compared}


class SiglipTextModelPolicy(PretrainedPolicy):
    """The tower of text alone."""

    stages = _TEXT_STAGES.under("text_model") if _WRAPPED else _TEXT_STAGES

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower."""
        return _around(_TEXT, "SiglipTextModel", "text_model.")


class SiglipVisionModelPolicy(PretrainedPolicy):
    """The tower of images alone."""

    stages = _VISION_STAGES.under("vision_model") if _WRAPPED else _VISION_STAGES

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower."""
        return _around(_VISION, "SiglipVisionModel", "vision_model.")


class SiglipForImageClassificationPolicy(SiglipVisionModelPolicy):
    """The tower of images with a label for each."""

    stages = _VISION_STAGES.under("vision_model", then="classifier")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and the classifier."""
        return _around(_VISION, "SiglipForImageClassification", "vision_model.", replicate("classifier"))
