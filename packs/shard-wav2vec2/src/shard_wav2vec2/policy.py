"""How Wav2Vec2 is sharded: convolutions that every rank has whole, and an encoder that is split."""

from __future__ import annotations

from typing import ClassVar

from shard_wav2vec2.layerdrop import layer_drop_of_config
from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import attribute, local_heads, norm, outputs, region, replicate, sequence, shared_numpy
from shardcore_transformers import PretrainedPolicy

__all__ = ["Wav2Vec2ModelPolicy"]


class Wav2Vec2ModelPolicy(PretrainedPolicy):
    """The model without a head; any number of ranks share its heads.

    Its norms lie before attention and behind the last layer (``do_stable_layer_norm``), or the other way round.
    """

    checks = (Heads("num_attention_heads", uneven=True),)
    stages = Stages(
        first=("feature_extractor", "feature_projection", "masked_spec_embed", "encoder.pos_conv_embed"),
        blocks="encoder.layers",
        last="adapter",
        everywhere="encoder.layer_norm",
        optional="masked_spec_embed",
    )
    #: What a head adds.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the model and of its head."""
        config = self.model.config
        stable = "StableLayerNorm" if config.do_stable_layer_norm else ""
        # A sum of the states of all layers is taken where each rank has those of its own tokens.
        divided = () if config.use_weighted_layer_sum else "attention"
        end = "layer_norm" if stable else "layers[-1]"
        qkv = ("attention.q_proj", "attention.k_proj", "attention.v_proj")
        return {
            "Wav2Vec2Model": [
                replicate("feature_extractor", "feature_projection"),
                replicate("masked_spec_embed", "adapter", optional=True),
                shared_numpy("_mask_hidden_states"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            f"Wav2Vec2Encoder{stable}": [
                replicate("pos_conv_embed"),
                norm("layer_norm"),
                layer_drop_of_config("layerdrop"),
                sequence(scatter="layers[0]", gather=end, attention=divided),
            ],
            f"Wav2Vec2EncoderLayer{stable}": [
                norm("layer_norm", "final_layer_norm"),
                region(enter="attention", col=qkv, row="attention.out_proj", unit="head"),
                attribute("attention.num_heads", local_heads),
                region(enter="feed_forward", col="feed_forward.intermediate_dense", row="feed_forward.output_dense"),
                replicate("adapter_layer", optional=True),
            ],
            **({"Wav2Vec2Adapter": [shared_numpy("forward")]} if config.add_adapter else {}),
            **self.rules,
        }
