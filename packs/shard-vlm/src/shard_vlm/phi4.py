"""How Phi-4 multimodal is sharded: Phi-3, whose table of words is followed by towers of images and of sounds."""

from __future__ import annotations

from typing_extensions import override

from shard_clip.towers import LAYER
from shard_phi.policy import Phi3Policy
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import by_heads, delegate, norm, outputs, region, replicate, segments, shared_numpy
from shardcore_transformers import PretrainedPolicy

_PROJECTIONS = tuple(f"{way}_proj_for_{what}" for what in ("speech", "vision_speech") for way in ("up", "down"))


class Phi4MultimodalPolicy(Phi3Policy):
    """The decoder, with its head or without; the towers are models of their own, what joins them is whole."""

    stages = Stages(
        first=("embed_tokens", "embed_dropout", "embed_tokens_extend"),
        blocks="layers",
        last="norm",
        everywhere="rotary_emb",
    )

    @override
    def module_policy(self) -> ModulePolicy:
        features = ("global_img_feature_extensor", "sub_img_feature_extensor")
        return {
            **super().module_policy(),
            "Phi4MultimodalImageEmbedding": [
                delegate("img_processor"),
                replicate("img_projection_up", "img_projection_down", *features),
            ],
            "Phi4MultimodalAudioEmbedding": [delegate("encoder"), replicate(*_PROJECTIONS)],
        }


class Phi4VisionPolicy(PretrainedPolicy):
    """The tower of images, with a head that pools what it sees, whole on every rank.

    It runs while the decoder does, whose tokens may be split: those of its own stay together.
    """

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first="embeddings", blocks="encoder.layers", last=("post_layernorm", "head"))

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its layers."""
        captured = outputs(attentions="heads", heads="encoder.layers.0.self_attn.num_heads")
        return {
            self.model: [replicate("embeddings", "head"), norm("post_layernorm"), captured],
            type(self.model.encoder.layers[0]): LAYER,
        }


class Phi4SoundsPolicy(PretrainedPolicy):
    """The tower of sounds, a Conformer: one table has a bias for each head; its convolutions are whole."""

    checks = (Heads("num_attention_heads"),)
    # What becomes of the mask, too, is found out by the convolutions in front of the blocks.
    stages = Stages(first="encoder_embedding", blocks="encoders", everywhere=("embed", "relative_attention_bias_layer"))

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its blocks."""
        return {
            "Phi4MultimodalAudioModel": [replicate("embed"), shared_numpy("_streaming_mask")],
            "Phi4MultimodalAudioRelativeAttentionBias": [by_heads("bias_values", dim=1)],
            "Phi4MultimodalAudioConformerEncoderLayer": [*self.attention(), norm("layer_norm"), replicate("conv")],
            "Phi4MultimodalAudioMLP": [norm("layer_norm"), region(col=segments("gate_up_proj", 2), row="down_proj")],
        }

    def attention(self) -> list[Rule]:
        """Return the rules of the attention of a block."""
        columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return [norm("layer_norm_att"), region(enter="self_attn", col=columns, row="self_attn.o_proj", unit="head")]
