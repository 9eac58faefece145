"""The rules of CLIP's two towers, each with heads of its own number; SigLIP has the same layers."""

from __future__ import annotations

from transformers.models.clip import modeling_clip

from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, norm, outputs, per_rank, region, replicate, sequence, vocab

__all__ = ["LAYER", "TEXT", "TEXT_STAGES", "VISION", "VISION_STAGES", "WRAPPED", "captured"]

#: Early releases wrap each tower once more where it is used alone.
WRAPPED = hasattr(modeling_clip, "CLIPTextTransformer")
_TOWER = "Transformer" if WRAPPED else "Model"

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


TEXT: ModulePolicy = {
    "CLIPEncoderLayer": LAYER,
    "CLIPTextEmbeddings": [vocab("token_embedding"), replicate("position_embedding")],
    f"CLIPText{_TOWER}": [
        norm("final_layer_norm"),
        sequence(scatter="encoder.layers[0]", gather="final_layer_norm"),
        captured(),
    ],
}
VISION: ModulePolicy = {
    "CLIPEncoderLayer": LAYER,
    "CLIPVisionEmbeddings": [replicate("")],
    f"CLIPVision{_TOWER}": [
        norm("pre_layrnorm", "post_layernorm"),
        sequence(scatter="encoder.layers[0]", gather="encoder.layers[-1]"),
        captured(),
    ],
}
TEXT_STAGES = Stages(first="embeddings", blocks="encoder.layers", last="final_layer_norm")
VISION_STAGES = Stages(first=("embeddings", "pre_layrnorm"), blocks="encoder.layers", last="post_layernorm")
