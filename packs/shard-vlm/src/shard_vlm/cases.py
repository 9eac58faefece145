"""Tiny models of images and text for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_vl import modeling_qwen2_vl

from shardcore_testing import Case, Supports, hidden_loss, text_batch, tiny, weighted_mean

__all__ = ["build", "cases", "inputs"]

_WORDS, _IMAGE, _TEXT = 101, 100, 7  # divide by no number of ranks
_MARKS = 96  # where ids begin that are no text

#: Of every tower: 4 patches and more of an image of 8 x 8.
_TOWER: dict[str, Any] = {
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "image_size": 8,
    "patch_size": 4,
}
#: Of every language model.
_LANGUAGE: dict[str, Any] = {
    "vocab_size": _WORDS,
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

_SPLIT = Supports(sequence=True, captured=("attentions", "hidden_states"))
#: What is read of the tower is no longer there in the next stage, or counted in words.
_WHOLE = replace(_SPLIT, pipeline=False)
#: The rows of Qwen's images are patches, of which a pipeline has no micro-batches; what its towers return as attentions
#: are no weights.
_PATCHES = replace(_SPLIT, pipeline=False, captured=("hidden_states",))
_STATES: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state",)}

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
_AROUND: dict[str, Any] = {"video_token_id": _MARKS, "vision_start_token_id": 97, "vision_end_token_id": 98}

#: By what the names of classes begin with: the tower and the language model, what differs in them and joins them, the
#: tokens of an image, and the parameters that no call reads.
_FAMILIES: dict[str, dict[str, Any]] = {
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
            "vocab_size_per_layer_input": _WORDS,
        },
        "joined": {"video_token_id": _MARKS, "audio_token_id": 98, "tie_word_embeddings": True},
        "collectives": (2, 3),
    },
    "Idefics3": {
        "tower": {"size": None},
        "language": {"model_type": "llama"},
        "text": "text_model",
        "joined": {"scale_factor": 2, "use_cache": False},
        "tokens": 1,
        "pieces": 1,
    },
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
        "supports": _PATCHES,
        "tower": {**_QWEN, "embed_dim": 48, "mlp_ratio": 1, "hidden_size": 64},
        "language": {**_TURNING, "model_type": "qwen2_vl_text"},
        "joined": _AROUND,
    },
    "Qwen2_5_VL": {
        "supports": _PATCHES,
        # A window has the size of an image, and one block sees all of it.
        "tower": {**_QWEN, "out_hidden_size": 64, "window_size": 16, "fullatt_block_indexes": [1]},
        "language": {**_TURNING, "model_type": "qwen2_5_vl_text"},
        "joined": _AROUND,
    },
    "Qwen3VL": {
        "supports": replace(_PATCHES, sequence=False),
        "tower": {**_QWEN3, "model_type": "qwen3_vl_vision"},
        "language": {**_TURNING, "model_type": "qwen3_vl_text"},
        "joined": _AROUND,
        "collectives": (2, 3),
    },
    "Qwen3VLMoe": {
        "supports": replace(_PATCHES, sequence=False, experts=True),
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
    "SmolVLM": {
        "tower": {"size": None},
        "language": {"model_type": "llama"},
        "text": "text_model",
        "joined": {"scale_factor": 2, "use_cache": False},
        "tokens": 1,
        "pieces": 1,
    },
}


#: The classes of what is inside of a family and no other pack's.
_TOWERS = {
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
_TEXTS = {
    "Qwen2VLTextModel": "Qwen2VL",
    "Qwen2_5_VLTextModel": "Qwen2_5_VL",
    "Qwen3VLMoeTextModel": "Qwen3VLMoe",
    "Qwen3VLTextModel": "Qwen3VL",
}
#: Of the tower of sounds: a block has two MLPs, and convolutions that mix its tokens.
_SOUNDS: dict[str, Any] = {
    "collectives": (3, 4),
    "whole": ("lconv1d",),
    "supports": Supports(captured=("attentions", "hidden_states"), dropout=False),
}


def _family(name: str) -> dict[str, Any]:
    inside = {**_TOWERS, **_TEXTS}.get(name)
    return _FAMILIES[inside or name.partition("For")[0].removesuffix("Model")]


def _class(name: str) -> Any:
    """Return the class ``name``; towers of Qwen are, or were in some releases, none that transformers itself names."""
    homes = (transformers, modeling_qwen2_vl, modeling_qwen2_5_vl)
    return next(getattr(home, name) for home in homes if hasattr(home, name))


def build(name: str, *, dropout: float = 0.0, seed: int = 0, heads: int = 4, beside: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; what no call reads is not trained, since no optimizer steps it.

    Args:
        name: the class.
        dropout: of the attention of the language model, or of the tower if it is one.
        seed: of the parameters.
        heads: of the language model, or of the tower if it is one.
        beside: the size of what each block of Gemma 4 reads of the words beside the states.
        **options: of the configuration.
    """
    family = _family(name)
    kv = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
    tower = {**_TOWER, **family["sounds" if "Audio" in name else "tower"]}
    language = {**_LANGUAGE, **kv, "attention_dropout": dropout, **family["language"]}
    language |= {"hidden_size_per_layer_input": beside} if name.startswith("Gemma4") else {}
    if name in _TOWERS:
        settings = {**tower, **dict.fromkeys(("num_attention_heads", "num_heads"), heads), "attention_dropout": dropout}
    elif name in _TEXTS:
        settings = language
    else:
        # Families call the id of an image one or the other.
        ids = dict.fromkeys(("image_token_id", "image_token_index"), _IMAGE)
        settings = {"vision_config": tower, "text_config": language, **ids, **family["joined"]}
    model = tiny(_class(name), seed=seed, **{"attn_implementation": "eager", **settings, **options})
    if "Moe" in name and name not in _TOWERS:
        model.set_experts_implementation("eager")  # the default multiplies in no float64
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in (kind := type(module).__name__) and "Gemma" in kind and "Gemma4" not in kind:
                module.weight.sub_(1)  # they multiply by 1 + weight
    for path, parameter in model.named_parameters():
        if name not in _TOWERS and any(part in path for part in family.get("unused", ())):
            parameter.requires_grad_(False)
    return model


def _images(name: str, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return three images of 8 x 8, in pieces where a family cuts them, or 16 patches of each one after another."""
    if name.startswith("Qwen"):
        patches = torch.randn(3 * 16, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
        grid = torch.tensor([[1, 4, 4]] * 3)
        if name in _TOWERS:
            return {"grid_thw": grid, "hidden_states": patches}
        return {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == _IMAGE).long()}
    if name.startswith("Gemma4"):
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(3, -1, -1).contiguous()
        patches = torch.rand(3, 16, 12, generator=generator, dtype=torch.float64)
        if name in _TOWERS:
            return {"pixel_values": patches, "pixel_position_ids": places}
        return {"pixel_values": patches, "image_position_ids": places, "mm_token_type_ids": (ids == _IMAGE).long()}
    family = _family(name)
    pieces = (family["pieces"],) if "pieces" in family and name not in _TOWERS else ()
    images = {"pixel_values": torch.randn(3, *pieces, 3, 8, 8, generator=generator, dtype=torch.float64)}
    if "size" in family and name not in _TOWERS:
        images["image_sizes"] = torch.tensor([family["size"]] * 3)
    if name.startswith(("Gemma3", "PaliGemma")):  # tokens of images see each other; PaliGemma's text does so by itself
        images["token_type_ids"] = (ids == _IMAGE).long() * name.startswith("Gemma3")
    return images


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids (3, N + 7) that begin with the N tokens of an image, the images, and labels."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__.removeprefix("FSDP")
    lengths = torch.tensor([7, 4, 6]).roll(seed)
    mask = (torch.arange(_TEXT) < lengths[:, None]).long()
    ids = torch.randint(1, _MARKS, (3, _TEXT), generator=generator) * mask
    if name == "Gemma4AudioModel":
        sounds = torch.randn(3, 24, 8, generator=generator, dtype=torch.float64)
        return {"input_features": sounds, "attention_mask": torch.arange(24) < 2 * lengths[:, None]}
    if name in _TOWERS:
        return _images(name, ids, generator)
    seen = torch.full((3, _family(name).get("tokens", 4)), _IMAGE)
    ids, mask = torch.cat([seen, ids], 1), torch.cat([torch.ones_like(seen), mask], 1)
    batch = {"input_ids": ids, "attention_mask": mask, **_images(name, ids, generator)}
    if name.endswith("ForSequenceClassification"):
        batch["labels"] = torch.randint(0, 2, (3,), generator=generator)
    if name.endswith("ForConditionalGeneration"):
        batch["labels"] = ids.masked_fill((mask == 0) | (ids == _IMAGE), -100)
    return batch


def _case(name: str, kind: str, own: dict[str, Any], **fields: Any) -> Case:
    """Return a case for the class ``kind`` of a family, or of what one is made of."""
    settings: dict[str, Any] = {
        "inputs": inputs,
        "sharded": ("q_proj", "v_proj", "embed_tokens"),
        "whole": own.get("whole", ()),
        "options": {"attn_implementation": ("eager", "sdpa")},
        "refuses": ({"heads": 1},),
        "collectives": own.get("collectives", (2, 2)),
        "supports": own.get("supports", _SPLIT),
        "tolerance": own.get("tolerance", 1e-12),
        **fields,
    }
    return Case(name=name, build=partial(build, kind), **settings)


def tower_loss(out: Any) -> Tensor:
    """Return a loss of all that a tower returns, states that go between the blocks of a language model too."""
    deep = out.get("deepstack_features")
    return hidden_loss(out) + (weighted_mean(*deep) if deep else 0.0)


def even_loss(out: Any) -> Tensor:
    """Return a loss that weighs all tokens alike: Pixtral makes one row of all images, or of those of a part."""
    return cast(Tensor, out.last_hidden_state.square().mean())


def cases() -> list[Case]:
    """Return a case for every class, and for what it is made of where that is no other pack's."""
    found = []
    for family, own in _FAMILIES.items():
        name, kind = family.lower(), f"{family}ForConditionalGeneration"
        supports = own.get("supports", _SPLIT)
        layers = f"{own.get('text', 'language_model')}.layers"
        found += [
            _case(
                f"{name}_generation",
                kind,
                own,
                outputs=("logits",),
                layers=f"model.{layers}",
                supports=replace(supports, generation=True),
            ),
            _case(f"{name}_model", f"{family}Model", own, layers=layers, **_STATES),
        ]
    kind, own = "Gemma3ForSequenceClassification", _FAMILIES["Gemma3"]
    layers = "model.language_model.layers"
    found.append(_case("gemma3_sequence_classification", kind, own, outputs=("logits",), layers=layers))
    kind, own = "Gemma4ForConditionalGeneration", _FAMILIES["Gemma4"]
    small = _case("gemma4_small_generation", kind, own, outputs=("logits",), layers=layers)
    # The model reads the table of words by itself, which is whole then.
    alone = replace(_SPLIT, sequence=False, generation=True)
    beside = partial(build, kind, beside=6)
    found.append(replace(small, build=beside, sharded=("q_proj", "v_proj"), whole=("per_layer",), supports=alone))
    for kind, family in _TEXTS.items():
        own = _FAMILIES[family]
        together = own["supports"].sequence
        supports = replace(_SPLIT, sequence=together, context=together, experts=own["supports"].experts)
        found.append(_case(f"{family.lower()}_text", kind, own, inputs=text_batch, supports=supports, **_STATES))
    for kind, family in _TOWERS.items():
        patches = family.startswith("Qwen")
        options = {"attn_implementation": ("eager", "sdpa"), **_FAMILIES[family].get("switches", {})}
        fields = {
            **_STATES,
            "options": options,
            "loss": tower_loss,
            "sharded": ("qkv",) if patches else ("q_proj", "v_proj"),
        }
        if family in ("Gemma4", "Mistral3") and "Audio" not in kind:
            fields["loss"] = even_loss
        supports = replace(_PATCHES, sequence=False, dropout=False) if patches else _SPLIT
        if "Audio" in kind:
            found.append(_case("gemma4_sounds", kind, _SOUNDS, **fields))
            continue
        # The bias of queries, keys and values together is one more.
        cost = {"collectives": (2, 3) if patches or family == "Gemma4" else (2, 2)}
        found.append(_case(f"{family.lower()}_tower", kind, cost, supports=supports, **fields))
    return found
