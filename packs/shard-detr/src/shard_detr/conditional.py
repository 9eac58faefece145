"""How Conditional DETR is sharded: its decoder projects contents and positions apart, and scales the positions."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from shard_detr.policy import DetrPolicy, heads_of
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, enter_arg, layer_drop, local_heads, norm, outputs, region, replicate

_PROJECTIONS = ("q_content_proj", "k_content_proj", "k_pos_proj", "v_proj")


class ConditionalDetrPolicy(DetrPolicy):
    """The model with its heads or without."""

    family: ClassVar[str] = "ConditionalDetr"
    checks = heads_of("ConditionalDetr")
    stages = Stages(
        first=("backbone", "position_embedding", "input_projection"),
        blocks=("encoder.layers", "decoder.layers"),
        between=("query_position_embeddings", "decoder.ref_point_head"),
        last="decoder.layernorm",
        everywhere="decoder.query_scale",  # between all layers of the decoder
    )

    @override
    def decoder(self) -> list[Rule]:
        # The positions of queries are used in front of the layers too, so they enter in each layer.
        return [
            *(enter_arg("", name) for name in ("spatial_position_embeddings", "encoder_hidden_states")),
            norm("layernorm"),
            replicate("query_scale", "ref_point_head"),
            layer_drop("layerdrop"),
            outputs(attentions="heads", cross_attentions="heads"),
        ]

    @override
    def decoder_layers(self) -> ModulePolicy:
        first, *others = self.base.decoder.layers
        across = (*_PROJECTIONS, "q_pos_sine_proj")
        # Only the first layer adds the learned positions of queries in front of the image.
        return {
            first: self.decoder_layer((*across, "q_pos_proj")),
            **{layer: self.decoder_layer(across) for layer in others},
        }

    def decoder_layer(self, columns: tuple[str, ...]) -> list[Rule]:
        """Return the rules of a layer of the decoder, which attends to the image with these linears."""
        up, down = self.mlp
        return [
            *(enter_arg("", name) for name in ("query_position_embeddings", "query_sine_embed")),
            *self.attention("self_attn", (*_PROJECTIONS, "q_pos_proj")),
            *self.attention("encoder_attn", columns),
            attribute("encoder_attn.num_attention_heads", local_heads),
            region(col=up, row=down),
            norm("final_layer_norm"),
        ]
