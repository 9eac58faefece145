"""What each head of Whisper adds to encoder and decoder."""

from __future__ import annotations

from shard_whisper.policy import DECODER, ENCODER, WhisperModelPolicy
from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import head, replicate
from shardcore_transformers import PretrainedPolicy

__all__ = [
    "WhisperForAudioClassificationPolicy",
    "WhisperForCausalLMPolicy",
    "WhisperForConditionalGenerationPolicy",
]


class WhisperForConditionalGenerationPolicy(WhisperModelPolicy):
    """Speech to text: the output head is tied to the decoder's embedding."""

    stages = WhisperModelPolicy.stages.under("model", then="proj_out")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the model and the head."""
        return {**super().module_policy(), "WhisperForConditionalGeneration": [head("proj_out")]}


class WhisperForCausalLMPolicy(PretrainedPolicy):
    """The decoder alone, as a language model."""

    stages = Stages(first=("embed_tokens", "embed_positions"), blocks="layers", last="layer_norm").under(
        "model.decoder", then="proj_out"
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the decoder and the head."""
        return {**DECODER, "WhisperForCausalLM": [head("proj_out")]}


class WhisperForAudioClassificationPolicy(PretrainedPolicy):
    """The encoder with a label for each recording."""

    stages = Stages(first=("conv1", "conv2", "embed_positions"), blocks="layers", last="layer_norm").under(
        "encoder", then=("layer_weights", "projector", "classifier"), optional="layer_weights"
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder and the classifier."""
        rules = [replicate("projector", "classifier"), replicate("layer_weights", optional=True)]
        return {**ENCODER, "WhisperForAudioClassification": rules}
