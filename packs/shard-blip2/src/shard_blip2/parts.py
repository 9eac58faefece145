"""The rules of BLIP-2's own parts: the tower of images, and the Q-Former that asks it questions."""

from __future__ import annotations

from shard_blip2.attention import attends
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import (
    attribute,
    enter_arg,
    norm,
    outputs,
    per_rank,
    region,
    replicate,
    segments,
    sequence,
    vocab,
)

VISION: ModulePolicy = {
    "Blip2VisionEmbeddings": [replicate("")],
    "Blip2EncoderLayer": [
        norm("layer_norm1", "layer_norm2"),
        region(
            enter="self_attn",
            col=segments("self_attn.qkv", 3),
            row="self_attn.projection",
            heads="self_attn.num_heads",
        ),
        region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
    ],
    "Blip2Attention": [attends()],
    "Blip2VisionModel": [
        norm("post_layernorm"),
        sequence(scatter="encoder.layers[0]", gather="encoder.layers[-1]"),
        outputs(attentions="heads", hidden_states="sequence", heads="encoder.layers.0.self_attn.num_heads"),
    ],
}
VISION_STAGES = Stages(first="embeddings", blocks="encoder.layers", last="post_layernorm")


def _attention(name: str, *, optional: bool = False) -> list[Rule]:
    """Return the rules of one attention of a block, whose residual connection is in its ``output``."""
    return [
        region(
            enter=f"{name}.attention",
            col=tuple(f"{name}.attention.{projection}" for projection in ("query", "key", "value")),
            row=f"{name}.output.dense",
            heads=f"{name}.attention.num_attention_heads",
            optional=optional,
        ),
        attribute(f"{name}.attention.num_attention_heads", per_rank, optional=optional),
        attribute(f"{name}.attention.all_head_size", per_rank, optional=optional),
        norm(f"{name}.output.LayerNorm", optional=optional),
    ]


#: Some blocks attend to the image. Queries and text have feed-forwards of their own, the latter where there is text.
QFORMER: ModulePolicy = {
    "Blip2QFormerModel": [
        norm("layernorm"),
        outputs(
            attentions="heads",
            cross_attentions="heads",
            heads="encoder.layer.0.attention.attention.num_attention_heads",
        ),
    ],
    "Blip2QFormerEncoder": [enter_arg("", "encoder_hidden_states")],
    "Blip2QFormerLayer": [
        *_attention("attention"),
        *_attention("crossattention", optional=True),
        region(col="intermediate_query.dense", row="output_query.dense"),
        norm("output_query.LayerNorm"),
        region(col="intermediate.dense", row="output.dense", optional=True),
        norm("output.LayerNorm", optional=True),
    ],
}
QFORMER_STAGES = Stages(first=("layernorm", "dropout"), blocks="encoder.layer")

TEXT: ModulePolicy = {"Blip2TextEmbeddings": [vocab("word_embeddings"), replicate("position_embeddings")]}
