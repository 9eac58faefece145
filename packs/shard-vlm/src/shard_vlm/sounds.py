"""How towers of sounds are sharded that come with a language model, and are no other pack's."""

from __future__ import annotations

from typing import ClassVar

from shard_llama.policy import LlamaPolicy
from shard_whisper.policy import WhisperPolicy
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import layer_drop, norm, outputs, replicate, sequence


class WhisperTowerPolicy(WhisperPolicy):
    """Voxtral, Audio Flamingo 3, Qwen2-Audio: Whisper's encoder, where states may be averaged before the last norm."""

    stages = Stages(first=("conv1", "conv2", "embed_positions"), blocks="layers", last="layer_norm")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its blocks."""
        return {
            self.model: [
                replicate("conv1", "conv2", "embed_positions"),
                layer_drop("layerdrop"),
                norm("layer_norm"),
                sequence(scatter="layers[0]", gather="layers[-1]"),
                outputs(attentions="heads", hidden_states="sequence", heads="layers.0.self_attn.num_heads"),
            ],
            type(self.model.layers[0]): self.block(),
        }


class GlmAsrTowerPolicy(LlamaPolicy):
    """GLM-ASR: convolutions in front of blocks like Llama's, whose MLPs have no gates."""

    rms: ClassVar[str | None] = None
    columns: ClassVar[tuple[str, ...]] = ("fc1",)
    row: ClassVar[str] = "fc2"
    stages = Stages(first=("conv1", "conv2"), blocks="layers", last="norm", everywhere="rotary_emb")

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        _, *others = super().decoder()
        return [replicate("conv1", "conv2"), *others]
