"""How BART is sharded, and mBART, Marian, Pegasus, M2M-100 and others, which are built like it under other names.

They differ in where their norms are: behind the blocks of mBART and Pegasus, tokens come together again at one.
"""

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
from shardcore_transformers import BaseModelPolicy


class BartPolicy(BaseModelPolicy):
    """Encoder and decoder, or the decoder alone, with a head or without."""

    #: The sizes of an attention that become those of this rank's heads.
    sizes: ClassVar[tuple[str, ...]] = ("num_heads",)

    labels = ("qa_outputs", "classification_head.dense", "classification_head.out_proj")
    stages = Stages(
        first=("shared", "encoder.embed_tokens", "encoder.embed_positions", "encoder.layernorm_embedding"),
        blocks=("encoder.layers", "decoder.layers"),
        between=(
            "encoder.layer_norm",
            "decoder.embed_tokens",
            "decoder.embed_positions",
            "decoder.layernorm_embedding",
        ),
        last="decoder.layer_norm",
        optional=(
            "shared",  # a Marian of two vocabularies shares no embedding
            "encoder.layernorm_embedding",
            "encoder.layer_norm",
            "decoder.layernorm_embedding",
            "decoder.layer_norm",
        ),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of encoder, decoder and head."""
        family = type(self.base.decoder).__name__.removesuffix("Decoder")
        encoder: ModulePolicy = {f"{family}Encoder": self.stack(), f"{family}EncoderLayer": self.block()}
        return {
            self.base: [vocab("shared", optional=True)],
            **(encoder if hasattr(self.base, "encoder") else {}),
            f"{family}Decoder": [
                enter_arg("", "encoder_hidden_states"),
                *self.stack("encoder_attn", cross_attentions="heads"),
            ],
            f"{family}DecoderLayer": [*self.block(), *self.attention("encoder_attn")],
            f"{family}Attention": [attribute(size, per_rank) for size in self.sizes],
            **self.heads(),
        }

    def stack(self, crosses: str = "", **captured: Any) -> list[Rule]:
        """Return the rules of a stack of blocks."""
        last = "layer_norm" if hasattr(self.base.decoder, "layer_norm") else "layers[-1]"
        heads = "layers.0.self_attn.num_heads"  # encoder and decoder may have different numbers
        return [
            vocab("embed_tokens"),
            replicate("embed_positions"),
            norm("layernorm_embedding", "layer_norm", optional=True),
            layer_drop("layerdrop"),
            sequence(scatter="layers[0]", gather=last, attention="self_attn", cross_attention=crosses, heads=heads),
            outputs(attentions="heads", hidden_states="sequence", heads=heads, **captured),
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


class MvpPolicy(BartPolicy):
    """MVP without prompts: what heads return is put together by the width that they have."""

    sizes = ("num_heads", "embed_dim")
