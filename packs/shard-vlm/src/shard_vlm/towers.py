"""How towers of images are sharded that come with a model of images and text, and are no other pack's."""

from __future__ import annotations

from shard_clip.towers import LAYER, captured
from shardcore.policy import Heads, ModulePolicy, Stages
from shardcore.styles import attribute, norm, norm_over_heads, outputs, per_rank, region, replicate, sequence
from shardcore_transformers import PretrainedPolicy

_PROJECTIONS = ("attention.q_proj", "attention.k_proj", "attention.v_proj")


class IdeficsTowerPolicy(PretrainedPolicy):
    """Idefics 3 and SmolVLM: the layers of CLIP."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first="embeddings", blocks="encoder.layers", last="post_layernorm")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its layers."""
        return {
            self.model: [
                replicate("embeddings"),
                norm("post_layernorm"),
                sequence(scatter="encoder.layers[0]", gather="post_layernorm"),
                captured(),
            ],
            type(self.model.encoder.layers[0]): LAYER,
        }


class InternVLVisionModelPolicy(PretrainedPolicy):
    """InternVL: scales what attention and MLP return, and may normalize queries and keys over all heads."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(first="embeddings", blocks="encoder.layer", last="layernorm")

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its layers."""
        norms = [
            norm_over_heads("attention.q_norm", rms="variance_epsilon"),
            norm_over_heads("attention.k_norm", rms="variance_epsilon", of="key"),
        ]
        return {
            "InternVLVisionModel": [
                replicate("embeddings"),
                norm("layernorm", optional=True),
                sequence(scatter="encoder.layer[0]", gather="encoder.layer[-1]"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "InternVLVisionLayer": [
                norm("layernorm_before", "layernorm_after"),
                replicate("lambda_1", "lambda_2"),
                region(
                    enter="attention",
                    col=_PROJECTIONS,
                    row="attention.projection_layer",
                    heads="attention.num_heads",
                ),
                *(norms if self.model.config.use_qk_norm else []),
                attribute("attention.num_heads", per_rank),
                attribute("attention.embed_dim", per_rank),
                region(enter="mlp", col="mlp.fc1", row="mlp.fc2"),
            ],
        }


class PixtralVisionModelPolicy(PretrainedPolicy):
    """Pixtral: the patches of all images are one sequence, through the blocks of Llama."""

    checks = (Heads("num_attention_heads"),)
    stages = Stages(
        first=("patch_conv", "ln_pre"), blocks="transformer.layers", everywhere="patch_positional_embedding"
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the tower and of its layers."""
        return {
            "PixtralVisionModel": [
                replicate("patch_conv"),
                norm("ln_pre", rms="variance_epsilon"),
                sequence(scatter="transformer.layers[0]", gather="transformer.layers[-1]"),
                outputs(attentions="heads", hidden_states="sequence"),
            ],
            "PixtralAttentionLayer": [
                norm("attention_norm", "ffn_norm", rms="variance_epsilon"),
                region(enter="attention", col=_PROJECTIONS, row="attention.o_proj", heads="attention.num_heads"),
                attribute("attention.num_heads", per_rank),
                region(
                    enter="feed_forward",
                    col=("feed_forward.gate_proj", "feed_forward.up_proj"),
                    row="feed_forward.down_proj",
                ),
            ],
        }
