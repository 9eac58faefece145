"""A tiny Phi-4 multimodal, and its towers, for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.models.phi4_multimodal import modeling_phi4_multimodal

from shard_vlm.sizes import LANGUAGE, SPLIT, STATES
from shardcore_testing import Case, Supports, tiny, weighted_mean

_SEEN, _HEARD, _MARKS = 100, 99, 98  # an image, a sound, and where ids begin that are no text
_BANDS, _SPECTRA = 8, 24
_IMAGES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 37,  # divides by no number of ranks
    "num_hidden_layers": 2,
    "image_size": 8,
    "crop_size": 8,
    "patch_size": 2,
    "image_token_id": _SEEN,
}
_SOUNDS: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 37,
    "num_blocks": 2,
    "ext_pw_out_channel": 48,
    "depthwise_separable_out_channel": 48,
    "input_size": _BANDS,
    "time_reduction": 4,
    "bias_max_distance": 4,
    "nemo_conv_channels": 6,
    "audio_token_id": _HEARD,
}
#: Not read: what follows the last state but one of the images, and what makes tokens of sounds where there is no image.
_UNREAD = ("img_processor.encoder.layers.1.", "post_layernorm", "img_processor.head", "proj_for_speech")


def build(name: str, *, dropout: float = 0.0, seed: int = 0, heads: int = 4, **options: Any) -> Any:
    """Return a tiny model of the class ``name``, whose towers and decoder have ``heads`` heads each."""
    images = {**_IMAGES, "num_attention_heads": heads, "attention_dropout": dropout}
    sounds = {**_SOUNDS, "num_attention_heads": heads, "dropout_rate": dropout}
    drawn = dict.fromkeys(("attention_dropout", "resid_pdrop", "embd_pdrop"), dropout)
    kv = {"num_attention_heads": heads, "num_key_value_heads": heads // 2 or 1}
    whole = {**LANGUAGE, **kv, **drawn, "vision_config": images, "audio_config": sounds}
    parts = {"VisionModel": images, "AudioModel": sounds}
    settings = next((part for kind, part in parts.items() if name.endswith(kind)), whole)
    kind = getattr(modeling_phi4_multimodal, name)
    model = tiny(kind, seed=seed, **{"attn_implementation": "eager", **settings, **options})
    for path, parameter in model.named_parameters():
        if settings is whole and any(part in path for part in _UNREAD):
            parameter.requires_grad_(False)
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids (3, N) that begin with those of an image and of a sound, both of them, and labels."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__.removeprefix("FSDP")
    pixels = torch.randn(3, 2, 3, 8, 8, generator=generator, dtype=torch.float64)  # each image as a whole, and its part
    spectra = torch.randn(3, _SPECTRA, _BANDS, generator=generator, dtype=torch.float64)
    sizes = torch.tensor([6, 4, 5]).roll(seed)
    heard = torch.arange(_SPECTRA) < 4 * sizes[:, None]
    if name.endswith("VisionModel"):
        return {"pixel_values": pixels[:, 0]}
    if name.endswith("AudioModel"):
        return {"hidden_states": spectra, "mask": heard}
    places = torch.arange(13 + 6 + 7)  # an image has 13 tokens
    ends = 13 + sizes + torch.tensor([7, 4, 6]).roll(seed)
    ids = torch.randint(1, _MARKS, (3, len(places)), generator=generator)
    ids = torch.where(places < 13 + sizes[:, None], _HEARD, ids)
    ids = torch.where(places < 13, _SEEN, ids) * (places < ends[:, None])
    batch = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "image_pixel_values": pixels,
        "image_sizes": torch.full((3, 2), 8),
        "image_attention_mask": torch.ones(3, 2, 4, 4, dtype=torch.long),
        "audio_input_features": spectra,
        "audio_embed_sizes": sizes,
        "audio_attention_mask": heard,
    }
    if name.endswith("ForCausalLM"):
        batch["labels"] = ids.masked_fill((ids == 0) | (ids >= _MARKS), -100)
    return batch


def states_loss(out: Any) -> Tensor:
    """Return a loss of the states that the tower of sounds returns by themselves."""
    return weighted_mean(out)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "sharded": ("qkv_proj", "q_proj", "embed_tokens", "gate_up_proj"),
        "options": {"attn_implementation": ("eager", "sdpa")},
        "refuses": ({"heads": 1},),
        "supports": replace(SPLIT, pipeline=False),  # what is read of the images is no longer there in the next stage
        **fields,
    }
    return Case(name=name, build=partial(build, kind), **settings)


def cases() -> list[Case]:
    """Return a case for every class."""
    joined = replace(SPLIT, pipeline=False)
    alone = Supports(dropout=False, checkpointing=False)
    return [
        _case(
            "phi4_generation",
            "Phi4MultimodalForCausalLM",
            outputs=("logits",),
            layers="model.layers",
            supports=replace(joined, generation=True),
        ),
        _case("phi4_model", "Phi4MultimodalModel", layers="layers", **STATES),
        _case(
            "phi4_images",
            "Phi4MultimodalVisionModel",
            layers="encoder.layers",
            sharded=("q_proj", "out_proj", "fc1"),
            supports=replace(SPLIT, sequence=False),
            **STATES,
        ),
        _case(
            "phi4_sounds",
            "Phi4MultimodalAudioModel",
            loss=states_loss,
            sharded=("q_proj", "o_proj", "gate_up_proj", "bias_values"),
            layers="encoders",
            collectives=(3, 5),  # the biases of gates and features together
            whole=("conv",),
            supports=alone,
        ),
    ]
