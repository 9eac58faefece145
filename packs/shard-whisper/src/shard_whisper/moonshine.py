"""How Moonshine is sharded: like Whisper, but its positions turn heads, and its decoder's MLPs are gated."""

from __future__ import annotations

from typing import Any

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
from shardcore_transformers import BaseModelPolicy

_SOUND = ("conv1", "conv2", "conv3", "groupnorm")


class MoonshinePolicy(BaseModelPolicy):
    """Encoder and decoder, with a head or without. All of its attentions have as many heads, for keys too."""

    words = ("proj_out",)
    stages = Stages(
        first=tuple(f"encoder.{name}" for name in _SOUND),
        blocks=("encoder.layers", "decoder.layers"),
        between=("encoder.layer_norm", "decoder.embed_tokens"),
        last="decoder.norm",
        everywhere=("encoder.rotary_emb", "decoder.rotary_emb"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of encoder, decoder and head."""
        return {
            "MoonshineEncoder": [replicate(*_SOUND), *self.stack("layer_norm")],
            "MoonshineEncoderLayer": [*self.block(), region(enter="mlp", col="mlp.fc1", row="mlp.fc2")],
            "MoonshineDecoder": [
                vocab("embed_tokens"),
                enter_arg("", "encoder_hidden_states"),
                *self.stack("norm", "encoder_attn", cross_attentions="heads"),
            ],
            "MoonshineDecoderLayer": [
                *self.block(),
                *self.attention("encoder_attn"),
                norm("final_layernorm"),
                region(enter="mlp", col=segments("mlp.fc1", 2), row="mlp.fc2"),
            ],
            **self.heads(),
        }

    @property
    def count(self) -> str:
        """The attribute of a configuration that counts the heads of both stacks; releases name it for either."""
        return str(self.model.config.attribute_map["num_key_value_heads"])

    def stack(self, last: str, crosses: str = "", **captured: Any) -> list[Rule]:
        """Return the rules that encoder and decoder share."""
        heads = f"layers.0.self_attn.config.{self.count}"
        return [
            norm(last),
            sequence(scatter="layers[0]", gather=last, attention="self_attn", cross_attention=crosses, heads=heads),
            outputs(attentions="heads", hidden_states="sequence", heads=heads, **captured),
        ]

    def block(self) -> list[Rule]:
        """Return the rules of what blocks of both stacks have."""
        return [norm("input_layernorm", "post_attention_layernorm"), *self.attention("self_attn")]

    def attention(self, name: str) -> list[Rule]:
        """Return the rules of one attention, which views queries, keys and values by one number of heads."""
        columns, heads = tuple(f"{name}.{linear}_proj" for linear in "qkv"), f"{name}.config.{self.count}"
        return [region(enter=name, col=columns, row=f"{name}.o_proj", heads=heads), attribute(heads, per_rank)]
