"""How Whisper is sharded: an encoder of sound, and a decoder of text that attends to it."""

from __future__ import annotations

from typing import Any

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
    shared_numpy,
    vocab,
)
from shardcore_transformers import BaseModelPolicy


class WhisperPolicy(BaseModelPolicy):
    """Encoder and decoder, or one of them alone, with a head or without."""

    words = ("proj_out",)
    stages = Stages(
        first=("encoder.conv1", "encoder.conv2", "encoder.embed_positions"),
        blocks=("encoder.layers", "decoder.layers"),
        between=("encoder.layer_norm", "decoder.embed_tokens", "decoder.embed_positions"),
        last=("decoder.layer_norm", "layer_weights", "projector", "classifier"),
        optional=("layer_weights", "projector", "classifier"),  # of a recording's label, beside an encoder alone
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of encoder, decoder and head."""
        base = [replicate("layer_weights", "projector", "classifier", optional=True)]
        if hasattr(self.base, "_mask_input_features"):  # SpecAugment, which masks features in training
            base.append(shared_numpy("_mask_input_features"))
        words = [vocab("embed_tokens"), enter_arg("", "encoder_hidden_states")]
        encoder: ModulePolicy = {
            "WhisperEncoder": [replicate("conv1", "conv2"), *self.stack()],
            "WhisperEncoderLayer": self.block(),
        }
        decoder: ModulePolicy = {
            "WhisperDecoder": [*words, *self.stack("encoder_attn", cross_attentions="heads")],
            "WhisperDecoderLayer": [*self.block(), *self.attention("encoder_attn")],
        }
        return {
            self.base: base,
            **(encoder if hasattr(self.base, "encoder") else {}),
            **(decoder if hasattr(self.base, "decoder") else {}),
            **self.heads(),
        }

    def stack(self, crosses: str = "", **captured: Any) -> list[Rule]:
        """Return the rules that encoder and decoder share."""
        heads = "layers.0.self_attn.num_heads"  # encoder and decoder may have different numbers
        return [
            replicate("embed_positions"),
            layer_drop("layerdrop"),
            norm("layer_norm"),
            sequence(
                scatter="layers[0]", gather="layer_norm", attention="self_attn", cross_attention=crosses, heads=heads
            ),
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
            attribute(f"{name}.num_heads", per_rank),
            norm(f"{name}_layer_norm"),
        ]
