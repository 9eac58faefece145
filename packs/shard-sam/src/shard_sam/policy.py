"""How SAM is sharded: its encoder of images, alone or with the decoder of masks that attends to prompts."""

from __future__ import annotations

from shardcore.policy import ModulePolicy, Stages
from shardcore.styles import attribute, norm, partial, per_rank, region, replicate, segments
from shardcore_transformers import PretrainedPolicy

#: All heads read the same tables of relative positions: each rank has the gradients of its own heads, which are summed.
_VISION: ModulePolicy = {
    "SamVisionEncoder": [replicate("patch_embed", "neck"), replicate("pos_embed", optional=True)],
    "SamVisionLayer": [
        norm("layer_norm1", "layer_norm2"),
        region(
            enter="attn",
            col=segments("attn.qkv", 3),
            row="attn.proj",
            heads="attn.num_attention_heads",
        ),
        partial("attn.rel_pos_h", "attn.rel_pos_w", optional=True),
        attribute("attn.num_attention_heads", per_rank),
        region(enter="mlp", col="mlp.lin1", row="mlp.lin2"),
    ],
}
#: Queries, keys and values come from different tensors, so each linear lets its own in.
_DECODER: ModulePolicy = {
    "SamAttention": [
        region(col=("q_proj", "k_proj", "v_proj"), row="out_proj", heads="num_attention_heads"),
        attribute("num_attention_heads", per_rank),
    ],
    "SamTwoWayAttentionBlock": [
        norm("layer_norm1", "layer_norm2", "layer_norm3", "layer_norm4"),
        region(enter="mlp", col="mlp.lin1", row="mlp.lin2"),
    ],
    "SamTwoWayTransformer": [norm("layer_norm_final_attn")],
    "SamMaskDecoder": [
        replicate("iou_token", "mask_tokens", "upscale_conv1", "upscale_conv2", "upscale_layer_norm"),
        replicate("output_hypernetworks_mlps", "iou_prediction_head"),
    ],
}


class SamVisionModelPolicy(PretrainedPolicy):
    """The encoder of images alone."""

    stages = Stages(
        first=("vision_encoder.patch_embed", "vision_encoder.pos_embed"),
        blocks="vision_encoder.layers",
        last="vision_encoder.neck",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of the encoder."""
        return _VISION


class SamModelPolicy(PretrainedPolicy):
    """The encoder of images, prompts, and the decoder of masks."""

    stages = Stages(
        first=("vision_encoder.patch_embed", "vision_encoder.pos_embed"),
        blocks="vision_encoder.layers",
        last=("vision_encoder.neck", "prompt_encoder", "mask_decoder"),
        everywhere="shared_image_embedding",
    )

    def module_policy(self) -> ModulePolicy:
        """Return the rules of both, and of the prompts between them."""
        return {**_VISION, **_DECODER, "SamModel": [replicate("shared_image_embedding", "prompt_encoder")]}
