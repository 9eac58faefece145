"""How Whisper is sharded: an encoder of sound, a decoder of text that attends to it, and what each head adds."""

from __future__ import annotations

from shardcore.integrations.transformers import PretrainedPolicy
from shardcore.policy import ModulePolicy, Row, Stages
from shardcore.styles import attribute, enter_arg, head, norm, outputs, per_rank, region, replicate, shared_numpy, vocab

__all__ = [
    "WhisperForAudioClassificationPolicy",
    "WhisperForCausalLMPolicy",
    "WhisperForConditionalGenerationPolicy",
    "WhisperModelPolicy",
]


def _attention(name: str, *also: str) -> list[Row]:
    """Return the rows of one attention; encoder and decoder may have different numbers of heads."""
    columns = (f"{name}.q_proj", f"{name}.k_proj", f"{name}.v_proj")
    return [
        region(enter=name, also=also, col=columns, row=f"{name}.out_proj", heads=f"{name}.num_heads"),
        attribute(f"{name}.num_heads", per_rank),
        norm(f"{name}_layer_norm"),
    ]


_MLP: list[Row] = [region(col="fc1", row="fc2"), norm("final_layer_norm")]

_ENCODER: ModulePolicy = {
    "WhisperEncoder": [
        replicate("conv1", "conv2", "embed_positions"),
        norm("layer_norm"),
        outputs(attentions="heads", heads="layers.0.self_attn.num_heads"),
    ],
    "WhisperEncoderLayer": [*_attention("self_attn"), *_MLP],
}

_DECODER: ModulePolicy = {
    "WhisperDecoder": [
        vocab("embed_tokens"),
        replicate("embed_positions"),
        enter_arg("", "encoder_hidden_states"),
        norm("layer_norm"),
        outputs(attentions="heads", cross_attentions="heads", heads="layers.0.self_attn.num_heads"),
    ],
    "WhisperDecoderLayer": [*_attention("self_attn"), *_attention("encoder_attn", "key_value_states"), *_MLP],
}

#: SpecAugment, with which transformers masks the features in training, draws from numpy.
_MODEL: ModulePolicy = {"WhisperModel": [shared_numpy("_mask_input_features")]}


class WhisperModelPolicy(PretrainedPolicy):
    """Encoder and decoder without a head."""

    stages = Stages(
        first=("encoder.conv1", "encoder.conv2", "encoder.embed_positions"),
        blocks=("encoder.layers", "decoder.layers"),
        last="decoder.layer_norm",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rows of encoder, decoder and the model around them."""
        return {**_ENCODER, **_DECODER, **_MODEL}


class WhisperForConditionalGenerationPolicy(WhisperModelPolicy):
    """Speech to text: the output head is tied to the decoder's embedding."""

    stages = WhisperModelPolicy.stages.under("model", then="proj_out")

    def module_policy(self) -> ModulePolicy:
        """Return the rows of the model and the head."""
        return {**super().module_policy(), "WhisperForConditionalGeneration": [head("proj_out")]}


class WhisperForCausalLMPolicy(PretrainedPolicy):
    """The decoder alone, as a language model."""

    stages = Stages(first="embed_tokens", blocks="layers", last="layer_norm").under("model.decoder", then="proj_out")

    def module_policy(self) -> ModulePolicy:
        """Return the rows of the decoder and the head."""
        return {**_DECODER, "WhisperForCausalLM": [head("proj_out")]}


class WhisperForAudioClassificationPolicy(PretrainedPolicy):
    """The encoder with a label for each recording."""

    stages = Stages(first=("conv1", "conv2", "embed_positions"), blocks="layers", last="layer_norm").under(
        "encoder", then=("projector", "classifier")
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rows of the encoder and the classifier."""
        rows = [replicate("projector", "classifier"), replicate("layer_weights", optional=True)]
        return {**_ENCODER, "WhisperForAudioClassification": rows}
