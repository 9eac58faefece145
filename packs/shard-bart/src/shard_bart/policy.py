"""How BART is sharded: an encoder, and a decoder that attends to it; heads are in `shard_bart.heads`."""

from __future__ import annotations

from typing import Any, ClassVar

from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import (
    attribute,
    enter_arg,
    layer_drop,
    norm,
    outputs,
    per_rank,
    region,
    replicate,
    sequence,
    vocab,
)
from shardcore_transformers import PretrainedPolicy

__all__ = ["BartDecoderPolicy", "BartModelPolicy"]


class BartDecoderPolicy(PretrainedPolicy):
    """The decoder, and what is the same in an encoder. Families differ in their names and in where their norms are."""

    #: What the names of the model's classes begin with.
    family: ClassVar[str] = "Bart"
    #: Where tokens may be together again: the norm after the blocks, or without one the last block.
    ends: ClassVar[str] = "layers[-1]"
    stages = Stages(
        first=("embed_tokens", "embed_positions", "layernorm_embedding"),
        blocks="layers",
        last="layer_norm",
        optional=("layernorm_embedding", "layer_norm"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and of its head."""
        crossing = self.attention("encoder_attn")
        return {
            f"{self.family}Decoder": [enter_arg("", "encoder_hidden_states"), *self.stack(cross_attentions="heads")],
            f"{self.family}DecoderLayer": [*self.block(), *crossing],
            f"{self.family}Attention": [attribute("num_heads", per_rank)],
            **self.head(),
        }

    def stack(self, **captured: Any) -> list[Rule]:
        """Return the rules of a stack of blocks."""
        return [
            vocab("embed_tokens"),
            replicate("embed_positions"),
            norm("layernorm_embedding", "layer_norm", optional=True),
            layer_drop("layerdrop"),
            sequence(scatter="layers[0]", gather=self.ends),
            outputs(attentions="heads", hidden_states="sequence", heads="layers.0.self_attn.num_heads", **captured),
        ]

    def block(self) -> list[Rule]:
        """Return the rules of what blocks of both stacks have."""
        return [*self.attention("self_attn"), region(col="fc1", row="fc2"), norm("final_layer_norm")]

    def attention(self, name: str) -> list[Rule]:
        """Return the rules of one attention; encoder and decoder may have different numbers of heads."""
        columns = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
        return [
            region(enter=name, col=columns, row=f"{name}.out_proj", heads=f"{name}.num_heads"),
            norm(f"{name}_layer_norm"),
        ]

    def head(self) -> ModulePolicy:
        """Return the rules of the head."""
        return {}


_ENCODER, _DECODER = (BartDecoderPolicy.stages.under(stack) for stack in ("encoder", "decoder"))


class BartModelPolicy(BartDecoderPolicy):
    """Encoder and decoder without a head."""

    stages = Stages(
        first=("shared", *_ENCODER.first),
        blocks=("encoder.layers", "decoder.layers"),
        between=(*_ENCODER.last, *_DECODER.first),
        last=_DECODER.last,
        optional=("shared", *_ENCODER.optional, *_DECODER.optional),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of encoder, decoder and head; a Marian of two vocabularies shares no embedding."""
        return {
            **super().module_policy(),
            f"{self.family}Model": [vocab("shared", optional=True)],
            f"{self.family}Encoder": self.stack(),
            f"{self.family}EncoderLayer": self.block(),
        }
