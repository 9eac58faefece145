"""How Wav2Vec2-BERT is sharded: a Conformer, with adapters that have attention and MLPs too."""

from __future__ import annotations

from typing_extensions import override

from shard_wav2vec2.conformer import QKV, Wav2Vec2ConformerPolicy, mlp
from shard_wav2vec2.layerdrop import layer_drop_of_config
from shardcore.policy import ModulePolicy, Rule, Stages
from shardcore.styles import attribute, local_heads, norm, region, replicate


class Wav2Vec2BertPolicy(Wav2Vec2ConformerPolicy):
    """Wav2Vec2-BERT, which sees spectra; adapters behind its encoder have attention and MLPs too, and are split.

    Its convolutions normalize each token by itself.
    """

    stages = Stages(
        first=("feature_projection", "masked_spec_embed"),
        blocks="encoder.layers",
        last=("intermediate_ffn", "adapter"),
        everywhere="encoder.embed_positions",
        optional=("masked_spec_embed",),
    )

    @override
    def module_policy(self) -> ModulePolicy:
        rules = super().module_policy()
        return {**rules, self.base: [*rules[self.base], mlp("intermediate_ffn")]}

    @override
    def encoder(self) -> list[Rule]:
        return [layer_drop_of_config("layerdrop")]

    @override
    def adapter(self) -> ModulePolicy:
        return {
            "Wav2Vec2BertAdapter": [replicate("proj", "proj_layer_norm", optional=True)],
            "Wav2Vec2BertAdapterLayer": [
                norm("residual_layer_norm", "self_attn_layer_norm", "ffn_layer_norm"),
                replicate("residual_conv", "self_attn_conv"),
                region(enter="self_attn", col=QKV, row="self_attn.linear_out", unit="head"),
                attribute("self_attn.num_heads", local_heads),
                mlp("ffn"),
            ],
        }
