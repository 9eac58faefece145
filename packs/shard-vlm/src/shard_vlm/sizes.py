"""The sizes of the tiny models of images and text, and what differs between their families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardcore_testing import Supports, hidden_loss

__all__ = [
    "FAMILIES",
    "IMAGE",
    "LANGUAGE",
    "MARKS",
    "PATCHES",
    "SOUNDS",
    "SPLIT",
    "STATES",
    "TEXT",
    "TEXTS",
    "TOWER",
    "TOWERS",
]

WORDS, IMAGE, TEXT = 101, 100, 7  # divide by no number of ranks
MARKS = 96  # where ids begin that are no text

#: Of every tower: 4 patches and more of an image of 8 x 8.
TOWER: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "image_size": 8,
    "patch_size": 4,
}
#: Of every language model.
LANGUAGE: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "intermediate_size": 83,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
#: Not read: what follows the last state but one of CLIP's tower.
_BEHIND = ("vision_tower.encoder.layers.1.", "vision_tower.post_layernorm")

SPLIT = Supports(sequence=True, captured=("attentions", "hidden_states"))
#: What is read of the tower is no longer there in the next stage, or counted in words.
_WHOLE = replace(SPLIT, pipeline=False)
#: The rows of Qwen's images are patches, of which a pipeline has no micro-batches; what its towers return as attentions
#: are no weights.
PATCHES = replace(SPLIT, pipeline=False, captured=("hidden_states",))
STATES: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state",)}

#: Of Qwen's towers: an image is 4 x 4 patches, of which 2 x 2 are merged.
_QWEN: dict[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
_QWEN3: dict[str, Any] = {
    **_QWEN,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
#: Of its language models: positions have three axes.
_TURNING: dict[str, Any] = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
}
_AROUND: dict[str, Any] = {"video_token_id": MARKS, "vision_start_token_id": 97, "vision_end_token_id": 98}
#: SmolVLM is one.
_IDEFICS3: dict[str, Any] = {
    "tower": {"size": None},
    "language": {"model_type": "llama"},
    "text": "text_model",
    "joined": {"scale_factor": 2, "use_cache": False},
    "tokens": 1,
    "pieces": 1,
}

#: By what the names of classes begin with: the tower and the language model, what differs in them and joins them, the
#: tokens of an image, and the parameters that no call reads.
FAMILIES: dict[str, dict[str, Any]] = {
    "AyaVision": {
        "tower": {"model_type": "siglip_vision_model", "vision_use_head": False},
        "language": {"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"]},
        "joined": {"downsample_factor": 2, "vision_feature_layer": -1, "adapter_layer_norm_eps": 1e-6},
        "tokens": 1,
        "unused": ("vision_tower.post_layernorm",),
    },
    "Gemma3": {
        "tower": {"model_type": "siglip_vision_model", "vision_use_head": False},
        "language": {
            "model_type": "gemma3_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 5,
        },
        "joined": {"mm_tokens_per_image": 4},
        "collectives": (2, 3),  # the third is that of the norms on queries and keys
    },
    "Gemma4": {
        "tower": {
            "model_type": "gemma4_vision",
            "num_key_value_heads": 4,
            "head_dim": 12,
            "patch_size": 2,
            "pooling_kernel_size": 2,
            "position_embedding_size": 16,
        },
        "sounds": {
            "model_type": "gemma4_audio",
            "subsampling_conv_channels": [8, 4],
            "attention_chunk_size": 4,
            "attention_context_left": 4,
            "output_proj_dims": 40,
        },
        "language": {
            "model_type": "gemma4_text",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 5,
            "global_head_dim": 24,
            "vocab_size_per_layer_input": WORDS,
        },
        "joined": {"video_token_id": MARKS, "audio_token_id": 98, "tie_word_embeddings": True},
        "collectives": (2, 3),
    },
    "Idefics3": _IDEFICS3,
    "InternVL": {
        "tower": {"model_type": "internvl_vision", "image_size": [8, 8], "patch_size": [4, 4]},
        "language": {"model_type": "qwen2"},
        "joined": {"downsample_ratio": 0.5, "vision_feature_layer": -1},
        "tokens": 1,
        "switches": {"use_qk_norm": (False, True), "use_mean_pooling": (True, False)},
    },
    "Llava": {
        "tower": {"model_type": "clip_vision_model"},
        "language": {"model_type": "llama"},
        "joined": {"image_seq_length": 4},
        "unused": _BEHIND,
        "supports": _WHOLE,
    },
    "LlavaNext": {
        "tower": {"model_type": "clip_vision_model"},
        "language": {"model_type": "mistral"},
        "joined": {"image_grid_pinpoints": [[8, 16], [16, 8]], "image_seq_length": 4},
        "tokens": 14,  # 4 of the whole, 8 of two halves, each of 2 rows of which ends with a token
        "pieces": 3,
        "size": [8, 16],
        "unused": _BEHIND,
        "supports": _WHOLE,
    },
    "LlavaOnevision": {
        "tower": {"model_type": "siglip_vision_model", "vision_use_head": False},
        "language": {"model_type": "qwen2"},
        "joined": {"image_grid_pinpoints": [[8, 16], [16, 8]], "vision_feature_layer": -1},
        "tokens": 14,
        "pieces": 3,
        "size": [8, 16],
        "unused": ("vision_tower.post_layernorm",),
    },
    "Mistral3": {
        "tower": {"model_type": "pixtral"},
        "language": {"model_type": "mistral"},
        "joined": {"spatial_merge_size": 1},
        "size": [8, 8],
        "supports": _WHOLE,
    },
    "PaliGemma": {
        "tower": {"model_type": "siglip_vision_model", "vision_use_head": False, "projection_dim": 64},
        "language": {"model_type": "gemma"},
        "joined": {"projection_dim": 64},
        "tolerance": 1e-11,  # its states are large, of which the loss of a case without a head is a small difference
    },
    "Qwen2VL": {
        "supports": PATCHES,
        "tower": {**_QWEN, "embed_dim": 48, "mlp_ratio": 1, "hidden_size": 64},
        "language": {**_TURNING, "model_type": "qwen2_vl_text"},
        "joined": _AROUND,
    },
    "Qwen2_5_VL": {
        "supports": PATCHES,
        # A window has the size of an image, and one block sees all of it.
        "tower": {**_QWEN, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
        "language": {**_TURNING, "model_type": "qwen2_5_vl_text"},
        "joined": _AROUND,
    },
    "Qwen3VL": {
        "supports": replace(PATCHES, sequence=False),
        "tower": {**_QWEN3, "model_type": "qwen3_vl_vision"},
        "language": {**_TURNING, "model_type": "qwen3_vl_text"},
        "joined": _AROUND,
        "collectives": (2, 3),
    },
    "Qwen3VLMoe": {
        "supports": replace(PATCHES, sequence=False, experts=True),
        "tower": {**_QWEN3, "model_type": "qwen3_vl_moe_vision"},
        "language": {
            **_TURNING,
            "model_type": "qwen3_vl_moe_text",
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 44,
        },
        "joined": _AROUND,
        "collectives": (2, 4),  # one more is that of the router
        "whole": ("gate",),
    },
    "SmolVLM": _IDEFICS3,
}


#: The classes of what is inside of a family and no other pack's.
TOWERS = {
    "Gemma4AudioModel": "Gemma4",
    "Gemma4VisionModel": "Gemma4",
    "Idefics3VisionTransformer": "Idefics3",
    "InternVLVisionModel": "InternVL",
    "PixtralVisionModel": "Mistral3",
    "Qwen2VisionTransformerPretrainedModel": "Qwen2VL",
    "Qwen2_5_VisionTransformerPretrainedModel": "Qwen2_5_VL",
    "Qwen3VLMoeVisionModel": "Qwen3VLMoe",
    "Qwen3VLVisionModel": "Qwen3VL",
    "SmolVLMVisionTransformer": "SmolVLM",
}
TEXTS = {
    "Qwen2VLTextModel": "Qwen2VL",
    "Qwen2_5_VLTextModel": "Qwen2_5_VL",
    "Qwen3VLMoeTextModel": "Qwen3VLMoe",
    "Qwen3VLTextModel": "Qwen3VL",
}
#: Of the tower of sounds: a block has two MLPs, and convolutions that mix its tokens.
SOUNDS: dict[str, Any] = {
    "collectives": (3, 4),
    "whole": ("lconv1d",),
    "supports": Supports(captured=("attentions", "hidden_states"), dropout=False, checkpointing=False),
}
