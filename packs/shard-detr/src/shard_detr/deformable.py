"""How Deformable DETR is sharded: a head looks at a few places of several feature maps, which it finds by itself."""

from __future__ import annotations

from typing import ClassVar

from typing_extensions import override

from shard_detr.policy import DetrPolicy, heads_of
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, enter_arg, local_heads, norm, per_rank, region, replicate


def looking(name: str) -> list[Rule]:
    """Return the rules of an attention to places, which a head finds and weighs by linears of its own."""
    col = (f"{name}.sampling_offsets", f"{name}.attention_weights", f"{name}.value_proj")
    return [
        region(enter=name, col=col, row=f"{name}.output_proj", unit="head"),
        norm(f"{name}_layer_norm"),
        attribute(f"{name}.n_heads", local_heads),
        attribute(f"{name}.d_model", per_rank),
    ]


class DeformableDetrPolicy(DetrPolicy):
    """The model with its heads or without. Weights of places are not those of tokens, and cannot be asked for."""

    family: ClassVar[str] = "DeformableDetr"
    checks = heads_of("DeformableDetr")
    labels = ("class_embed", "bbox_embed")
    first: ClassVar[tuple[str, ...]] = ("backbone", "position_embedding", "input_proj", "level_embed")
    #: What makes the first places of queries, or of what the encoder returns.
    between: ClassVar[tuple[str, ...]] = (
        *("query_position_embeddings", "reference_points"),
        *("enc_output", "enc_output_norm", "pos_trans", "pos_trans_norm"),
    )
    #: What is read between all layers of the decoder.
    refining: ClassVar[tuple[str, ...]] = ("bbox_embed", "class_embed")
    stages = Stages(
        first=first,
        blocks=("encoder.layers", "decoder.layers"),
        between=between,
        everywhere=("decoder.bbox_embed", "decoder.class_embed"),
        optional=between,
    )

    @override
    def module_policy(self) -> ModulePolicy:
        around = [replicate(*self.first), replicate(*self.between, optional=True)]
        return {**super().module_policy(), self.base: around}

    @override
    def encoder(self) -> list[Rule]:
        return [enter_arg("", "spatial_position_embeddings")]

    @override
    def encoder_layer(self) -> list[Rule]:
        # Values are made of the same states, which enter once more.
        return [enter_arg("self_attn", "encoder_hidden_states"), *looking("self_attn"), *self.feed_forward()]

    @override
    def decoder(self) -> list[Rule]:
        entering = ("object_queries_position_embeddings", "encoder_hidden_states")
        return [*(enter_arg("", name) for name in entering), replicate(*self.refining, optional=True)]

    @override
    def decoder_layers(self) -> ModulePolicy:
        return {f"{self.family}DecoderLayer": [*self.entering(), *self.block(), *looking("encoder_attn")]}

    def entering(self) -> list[Rule]:
        """Return the rules of what a layer of the decoder is given, and is read in front of it too."""
        return [enter_arg("", "reference_points")]
