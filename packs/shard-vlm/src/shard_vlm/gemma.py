"""How Gemma 4 with images and sounds is sharded: its towers, and what it reads of the table of words."""

from __future__ import annotations

from typing import Any

from shard_gemma.fourth import Gemma4Policy
from shard_vlm.policy import VisionLanguagePolicy
from shardcore.policy import Heads, ModulePolicy, Rule, Stages
from shardcore.styles import (
    attribute,
    delegate,
    local_groups,
    norm,
    outputs,
    partial,
    per_rank,
    region,
    replicate,
    sequence,
)
from shardcore_transformers import PretrainedPolicy

_AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def _linears(module: str, *names: str) -> tuple[str, ...]:
    """Return the linears inside of those that may clip what they read and return."""
    return tuple(f"{module}.{name}.linear" for name in names)


class Gemma4VisionModelPolicy(PretrainedPolicy):
    """The tower of images: the blocks of Gemma 3, without a norm behind them."""

    checks = (Heads("num_attention_heads", kv="num_key_value_heads"),)
    stages = Stages(
        first="patch_embedder",
        blocks="encoder.layers",
        everywhere=("encoder.rotary_emb", "std_bias", "std_scale"),
        optional=("std_bias", "std_scale"),
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its blocks."""
        queries, *keys = _linears("self_attn", "q_proj", "k_proj", "v_proj")
        return {
            "Gemma4VisionModel": [
                replicate("patch_embedder"),
                sequence(scatter="encoder.layers[0]", gather="encoder.layers[-1]"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "Gemma4VisionEncoderLayer": [
                norm(*_AROUND, rms="eps"),
                region(
                    enter="self_attn",
                    col=queries,
                    kv=tuple(keys),
                    row="self_attn.o_proj.linear",
                    unit="head",
                    partial=("self_attn.q_norm", "self_attn.k_norm"),
                ),
                attribute("self_attn.num_key_value_groups", local_groups),
                region(enter="mlp", col=_linears("mlp", "gate_proj", "up_proj"), row="mlp.down_proj.linear"),
            ],
        }


class Gemma4AudioModelPolicy(PretrainedPolicy):
    """The tower of sounds, a Conformer; its convolutions are whole on every rank."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first="subsample_conv_projection", blocks="layers", last="output_proj", everywhere="rel_pos_enc")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its blocks."""
        return {
            "Gemma4AudioModel": [replicate("subsample_conv_projection", "output_proj"), outputs(attentions="heads")],
            "Gemma4AudioLayer": [
                norm("norm_pre_attn", "norm_post_attn", "norm_out", rms="eps"),
                replicate("lconv1d"),
                region(
                    enter="self_attn",
                    col=(*_linears("self_attn", "q_proj", "k_proj", "v_proj"), "self_attn.relative_k_proj"),
                    row="self_attn.post.linear",
                    unit="head",
                ),
                partial("self_attn.per_dim_scale"),
                attribute("self_attn.num_heads", per_rank),
            ],
            "Gemma4AudioFeedForward": [
                norm("pre_layer_norm", "post_layer_norm", rms="eps"),
                region(col="ffw_layer_1.linear", row="ffw_layer_2.linear"),
            ],
        }


class _WholeWordsPolicy(Gemma4Policy):
    """Gemma 4 whose table of words is whole on every rank."""

    def decoder(self) -> list[Rule]:
        """Return the rules of what is around the blocks."""
        _, *others = super().decoder()
        return [replicate("embed_tokens"), *others]


class Gemma4MultimodalPolicy(VisionLanguagePolicy):
    """Gemma 4 with images and sounds. Where each block reads of the words, the model looks one word up by itself.

    So the table of words, and the head that is tied to it, are whole on every rank then.
    """

    def module_policy(self) -> ModulePolicy:
        """Return the rules of what joins the models inside, and of the head."""
        rules = dict(super().module_policy())
        text: Any = self.inside.language_model
        if text.config.hidden_size_per_layer_input:
            inside = [rule for rule in rules[self.inside] if "language_model" not in rule.text]
            rules[self.inside] = [*inside, delegate("language_model", policy=_WholeWordsPolicy)]
            if self.inside is not self.model:
                _, *others = rules[self.model]
                rules[self.model] = [replicate("lm_head"), *others]
        return rules
