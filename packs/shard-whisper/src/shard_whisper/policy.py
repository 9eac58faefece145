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
from shardcore_transformers import PretrainedPolicy

__all__ = ["DECODER", "ENCODER", "WhisperModelPolicy"]


def _attention(name: str) -> list[Rule]:
    """Return the rules of one attention; encoder and decoder may have different numbers of heads."""
    columns = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
    return [
        region(enter=name, col=columns, row=f"{name}.out_proj", heads=f"{name}.num_heads"),
        attribute(f"{name}.num_heads", per_rank),
        norm(f"{name}_layer_norm"),
    ]


def _stack(**captured: Any) -> list[Rule]:
    """Return the rules that encoder and decoder share."""
    return [
        replicate("embed_positions"),
        layer_drop("layerdrop"),
        norm("layer_norm"),
        sequence(scatter="layers[0]", gather="layer_norm"),
        outputs(attentions="heads", hidden_states="sequence", heads="layers.0.self_attn.num_heads", **captured),
    ]


_LAYER: list[Rule] = [*_attention("self_attn"), region(col="fc1", row="fc2"), norm("final_layer_norm")]
ENCODER: ModulePolicy = {
    "WhisperEncoder": [replicate("conv1", "conv2"), *_stack()],
    "WhisperEncoderLayer": _LAYER,
}
DECODER: ModulePolicy = {
    "WhisperDecoder": [
        vocab("embed_tokens"),
        enter_arg("", "encoder_hidden_states"),
        *_stack(cross_attentions="heads"),
    ],
    "WhisperDecoderLayer": [*_LAYER, *_attention("encoder_attn")],
}


class WhisperModelPolicy(PretrainedPolicy):
    """Encoder and decoder without a head."""

    stages = Stages(
        first=("encoder.conv1", "encoder.conv2", "encoder.embed_positions"),
        blocks=("encoder.layers", "decoder.layers"),
        between=("encoder.layer_norm", "decoder.embed_tokens", "decoder.embed_positions"),
        last="decoder.layer_norm",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of encoder and decoder; SpecAugment, which masks features in training, draws from numpy."""
        return {**ENCODER, **DECODER, "WhisperModel": [shared_numpy("_mask_input_features")]}
