"""Switches that the checkpoints of some models have, and the defaults of their configurations lack."""

from __future__ import annotations

from typing import Any

_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}}
_TURNS = {"rope_type": "default", "rope_theta": 1e4}
_SLIDING = [*["sliding_attention"] * 3, "full_attention"]
_MIXTURE = {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}
#: Without them a model cannot be built or called. They are of a model type, of that of a part, or of a class.
_SETTINGS: dict[str, dict[str, Any]] = {
    "align": {"projection_dim": 320},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "chameleon": {"vocabulary_map": {"<image>": 4}},
    "cohere_compass_text": {
        "layer_types": _SLIDING * 10,
        "rope_parameters": {"full_attention": _TURNS, "sliding_attention": _TURNS},
    },
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2_text": {
        **_MIXTURE,
        "mlp_layer_types": ["dense", *["sparse"] * 31],
        "n_group": 1,
        "topk_group": 1,
    },
    "depth_pro": {
        "fusion_hidden_size": 64,
        "intermediate_feature_dims": [64, 64],
        "intermediate_hook_ids": [1, 0],
        "scaled_images_feature_dims": [64, 64, 32],
    },
    "diffusion_gemma_text": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 704},
    "dots1": _MIXTURE,
    "emu3": {"vocabulary_map": {"<image>": 4, "<|extra_200|>": 5}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_TURNS, "mrope_section": [24, 24, 16]}},
    "glm4v_text": _MROPE,
    "granitemoehybrid": {"layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 26]},
    "hiera": {"decoder_hidden_size": 512, "decoder_depth": 2, "decoder_num_heads": 16},
    "hunyuan_vl_text": {"head_dim": 128, "rope_parameters": {**_TURNS, "mrope_section": [16, 16, 16, 16]}},
    "instructblip": {"image_token_index": 32000},
    "instructblipvideo": {"video_token_index": 32000},
    "lfm2_moe": {"layer_types": [*["conv"] * 2, "full_attention", *["conv"] * 29]},
    "llama4_text": {"hidden_size": 1280, "num_attention_heads": 10, "num_key_value_heads": 2},
    "llama4_vision_model": {"hidden_size": 1024, "intermediate_size": 4096, "vision_output_dim": 4096},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "molmo2_adapter": {"vision_feature_layer": [-1, -2]},
    "moonshine_streaming": {"num_key_value_heads": 8},
    "qwen2_5_vl_text": _MROPE,
    "qwen2_vl_text": _MROPE,
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
    "sapiens2": {"head_config": {"upsample_out_channels": [768, 512], "conv_out_channels": [512, 512]}},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "shieldgemma2": {"yes_token_index": 10784, "no_token_index": 3771},
    "vipllava": {"vision_feature_layers": [-2, -1]},
    "xmod": {"default_language": "en_XX"},
}


def configuration(model_class: Any) -> Any:
    """Return the default configuration of a class of transformers, with the switches of its checkpoints."""
    config = model_class.config_class()
    given = _settings(config) | _SETTINGS.get(model_class.__name__, {})
    return type(config)(**given) if given else config


def _settings(config: Any) -> dict[str, Any]:
    """Return what a configuration is built from, so that it and its parts have the switches of checkpoints."""
    found = dict(_SETTINGS.get(config.model_type, {}))
    for name, part in vars(config).items():
        if hasattr(part, "model_type") and (inner := _settings(part)):
            found[name] = type(part)(**inner).to_dict()
    return found
