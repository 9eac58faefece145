"""How Gemma 4's towers are sharded, that of images and that of sounds."""

from __future__ import annotations

from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import attribute, local_groups, norm, outputs, partial, per_rank, region, replicate, sequence
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
    # What becomes of the mask, too, is found out by the convolutions in front of the blocks.
    stages = Stages(blocks="layers", last="output_proj", everywhere=("subsample_conv_projection", "rel_pos_enc"))

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
