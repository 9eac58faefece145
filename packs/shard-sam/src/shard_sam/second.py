"""How SAM 2 is sharded: stages of blocks with heads of their own numbers, and a decoder of masks."""

from __future__ import annotations

from typing import Any, ClassVar

from shard_swin.stages import HeadsOfStages, shared
from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import attribute, norm, per_rank, refuse, region, replicate, segments
from shardcore_transformers import PretrainedPolicy

_HEADS = "attn.num_attention_heads"


def _has_more_linears(block: Any) -> bool:
    return len(block.mlp.layers) > 0


_VISION: ModulePolicy = {
    "Sam2HieraDetModel": [replicate("patch_embed", "pos_embed", "pos_embed_window")],
    "Sam2MultiScaleBlock": [
        norm("layer_norm1", "layer_norm2"),
        replicate("proj", optional=True),  # where a stage begins, past the attention
        shared(
            _HEADS,
            region(enter="attn", col=segments("attn.qkv", 3), row="attn.proj", heads=_HEADS),
            attribute(_HEADS, per_rank),
            whole="attn",
        ),
        region(col="mlp.proj_in", row="mlp.proj_out"),
    ],
}
#: Queries, keys and values come from different tensors, so each linear lets its own in.
_DECODER: ModulePolicy = {
    "Sam2Attention": [
        region(col=("q_proj", "k_proj", "v_proj"), row="o_proj", heads="num_attention_heads"),
        attribute("num_attention_heads", per_rank),
    ],
    "Sam2TwoWayAttentionBlock": [
        refuse(
            _has_more_linears, "its MLPs have linears between the first and the last, which would be split in turns"
        ),
        norm("layer_norm1", "layer_norm2", "layer_norm3", "layer_norm4"),
        region(col="mlp.proj_in", row="mlp.proj_out"),
    ],
    "Sam2TwoWayTransformer": [norm("layer_norm_final_attn")],
    "Sam2MaskDecoder": [
        replicate("iou_token", "mask_tokens", "obj_score_token", "upscale_conv1", "upscale_conv2"),
        replicate("upscale_layer_norm", "conv_s0", "conv_s1"),
        replicate("output_hypernetworks_mlps", "iou_prediction_head", "pred_obj_score_head"),
    ],
}


class Sam2HieraDetModelPolicy(PretrainedPolicy):
    """The stages of blocks alone."""

    checks = (HeadsOfStages("config.num_attention_heads_per_stage"),)
    stages = Stages(first=("patch_embed", "pos_embed", "pos_embed_window"), blocks="blocks")
    #: What is around the stages.
    rules: ClassVar[ModulePolicy] = {}

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the stages, and of what is around them."""
        return {**_VISION, **self.rules}


class Sam2VisionModelPolicy(Sam2HieraDetModelPolicy):
    """The encoder of images alone."""

    checks = (HeadsOfStages("config.backbone_config.num_attention_heads_per_stage"),)
    stages = Sam2HieraDetModelPolicy.stages.under("backbone", then="neck")
    rules: ClassVar[ModulePolicy] = {"Sam2VisionModel": [replicate("neck")]}


class Sam2ModelPolicy(Sam2HieraDetModelPolicy):
    """The encoder of images, prompts, and the decoder of masks."""

    checks = (HeadsOfStages("config.vision_config.backbone_config.num_attention_heads_per_stage"),)
    stages = Sam2VisionModelPolicy.stages.under(
        "vision_encoder", then=("prompt_encoder", "mask_decoder", "no_memory_embedding", "shared_image_embedding")
    )
    rules: ClassVar[ModulePolicy] = {
        **Sam2VisionModelPolicy.rules,
        **_DECODER,
        "Sam2Model": [replicate("shared_image_embedding", "prompt_encoder", "no_memory_embedding")],
    }
