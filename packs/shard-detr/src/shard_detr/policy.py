"""How DETR is sharded: convolutions whole, an encoder of the image, and a decoder of queries that attends to it."""

from __future__ import annotations

from typing import ClassVar

from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import enter_arg, norm, outputs, region, replicate, sequence
from shardcore_transformers import BaseModelPolicy


def heads_of(family: str) -> tuple[Heads, ...]:
    """Return the checks of a family: encoder and decoder have heads of their own number, which any ranks share."""
    decoder = (f"{family}Decoder", f"{family}DecoderLayer")
    return (
        Heads("encoder_attention_heads", uneven=True),
        *(Heads("decoder_attention_heads", uneven=True, of=name) for name in decoder),
    )


class DetrPolicy(BaseModelPolicy):
    """The model with its heads or without. Positions are added to what enters an attention, so they enter too."""

    family: ClassVar[str] = "Detr"
    checks = heads_of("Detr")
    labels = ("class_labels_classifier", "bbox_predictor")
    stages = Stages(
        first=("backbone", "position_embedding", "input_projection"),
        blocks=("encoder.layers", "decoder.layers"),
        between="query_position_embeddings",
        last="decoder.layernorm",
        optional="position_embedding",
    )
    #: What the stacks are given besides states, and add to queries and keys.
    positions: ClassVar[tuple[str, str]] = ("spatial_position_embeddings", "object_queries_position_embeddings")
    stack: ClassVar[str] = "Encoder"
    queries: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    out: ClassVar[str] = "o_proj"
    mlp: ClassVar[tuple[str, str]] = ("mlp.fc1", "mlp.fc2")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of all parts."""
        around = replicate("backbone", "input_projection", "query_position_embeddings")
        return {
            self.base: [around, replicate("position_embedding", optional=True)],
            f"{self.family}{self.stack}": self.encoder(),
            f"{self.family}EncoderLayer": self.encoder_layer(),
            f"{self.family}Decoder": self.decoder(),
            **self.decoder_layers(),
            **self.heads(),
        }

    def encoder(self) -> list[Rule]:
        """Return the rules of the encoder."""
        return [
            enter_arg("", self.positions[0]),
            sequence(scatter="layers[0]", gather="layers[-1]"),
            outputs(attentions="heads", hidden_states="sequence"),
        ]

    def encoder_layer(self) -> list[Rule]:
        """Return the rules of a layer of the encoder."""
        return self.block()

    def decoder(self) -> list[Rule]:
        """Return the rules of the decoder, whose few tokens stay whole."""
        return [
            *(enter_arg("", name) for name in (*self.positions, "encoder_hidden_states")),
            norm("layernorm"),
            outputs(attentions="heads", cross_attentions="heads"),
        ]

    def decoder_layers(self) -> ModulePolicy:
        """Return the rules of the layers of the decoder."""
        return {f"{self.family}DecoderLayer": [*self.block(), *self.attention("encoder_attn", self.queries)]}

    def block(self) -> list[Rule]:
        """Return the rules of what layers of both stacks have."""
        return [*self.attention("self_attn", self.queries), *self.feed_forward()]

    def feed_forward(self) -> list[Rule]:
        """Return the rules of the MLP of a layer."""
        up, down = self.mlp
        return [region(col=up, row=down), norm("final_layer_norm")]

    def attention(self, name: str, columns: tuple[str, ...]) -> list[Rule]:
        """Return the rules of one attention."""
        col = tuple(f"{name}.{column}" for column in columns)
        return [region(enter=name, col=col, row=f"{name}.{self.out}", unit="head"), norm(f"{name}_layer_norm")]
