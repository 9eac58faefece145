"""Tiny CLIPs and SigLIPs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

_HAS_SECOND = Version(transformers.__version__) >= Version("5.10.0rc0")
_STATES = ("last_hidden_state",)

_WORDS, _END = 101, 100  # divides by no number of ranks
_TOKENS = {"bos_token_id": 1, "eos_token_id": _END, "pad_token_id": 0}


def _tower(hidden: int, heads: int, dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 37,  # divides by no number of ranks
        "num_hidden_layers": 2,
        "attention_dropout": dropout,
    }


def build(name: str, *, dropout: float = 0.0, seed: int = 0, heads: int = 12, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; its tower of images has twice the ``heads`` of the one of text."""
    text = {**_tower(48, heads, dropout), "vocab_size": _WORDS, "max_position_embeddings": 9, **_TOKENS}
    vision = {**_tower(72, 2 * heads, dropout), "image_size": 8, "patch_size": 4}
    met = {"projection_size": 72} if name.startswith("Siglip") else {"projection_dim": 20}  # where both towers meet
    settings: dict[str, Any] = {"attn_implementation": "eager", **options}
    if name.startswith("Siglip2"):  # images of several sizes, in patches
        vision["num_patches"] = vision.pop("image_size") // 2
    match name.removeprefix("CLIP").removeprefix("Siglip").removeprefix("2"):
        case "TextModel" | "TextModelWithProjection":
            settings |= {**text, **met}
        case "VisionModel" | "VisionModelWithProjection":
            settings |= {**vision, **met}
        case _:
            settings |= {"text_config": {**text, **met}, "vision_config": vision, **met, "num_labels": 3}
    return tiny(getattr(transformers, name), seed=seed, **settings)


def _ids(generator: torch.Generator, seed: int) -> dict[str, Tensor]:
    ids = torch.randint(1, _END, (3, 7), generator=generator)
    lengths = torch.tensor([(7, 4, 6), (5, 7, 2), (3, 3, 7)][seed % 3])
    mask = (torch.arange(7) < lengths[:, None]).long()
    ids[torch.arange(3), lengths - 1] = _END
    return {"input_ids": ids * mask, "attention_mask": mask}


def _patches(generator: torch.Generator, seed: int) -> dict[str, Tensor]:
    shapes = torch.tensor([(2, 2), (1, 3), (2, 1)]).roll(seed, 0)
    mask = (torch.arange(4) < shapes.prod(1, keepdim=True)).long()
    pixels = torch.randn(3, 4, 48, generator=generator, dtype=torch.float64)
    return {"pixel_values": pixels * mask[..., None], "pixel_attention_mask": mask, "spatial_shapes": shapes}


def inputs(model: Any, seed: int, *, size: int = 8) -> dict[str, Any]:
    """Return what the model's class takes: ids (3, 7) that end somewhere, images (3, 3, ``size``, ``size``), labels."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__
    batch: dict[str, Any] = {} if "Vision" in name or "Image" in name else _ids(generator, seed)
    if "Text" not in name and name.startswith("Siglip2"):
        batch |= _patches(generator, seed)
    elif "Text" not in name:
        batch["pixel_values"] = torch.randn(3, 3, size, size, generator=generator, dtype=torch.float64)
        if size != 8:
            batch["interpolate_pos_encoding"] = True
    if name.endswith("Classification"):
        batch["labels"] = torch.randint(0, 3, (3,), generator=generator)
    elif name in ("CLIPModel", "SiglipModel", "Siglip2Model"):
        batch["return_loss"] = True
    return batch


def projected_loss(out: Any) -> Tensor:
    """Return a loss of a tower with a projection: a weighted mean of all that it returns."""
    return weighted_mean(out.get("text_embeds", out.get("image_embeds"))) + hidden_loss(out)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "sharded": ("self_attn.q_proj", "self_attn.out_proj", "mlp.fc1", "mlp.fc2"),
        "supports": Supports(tensor_parallel=(1, 2, 3, 4), sequence=True, captured=("attentions", "hidden_states")),
        **fields,
    }
    return Case(name=name, build=partial(build, kind), **settings)


def _siglip(family: str, prefix: str, pooled: dict[str, Any], both: dict[str, Any]) -> list[Case]:
    ways = {"vision_use_head": (True, False)}
    # Embeddings of SigLIP 2 read the sizes of images, which a pipeline does not have when it looks at its stages.
    images = Supports(
        tensor_parallel=(1, 2, 3, 4), sequence=True, captured=("attentions", "hidden_states"), pipeline=not prefix
    )
    return [
        _case(f"{prefix}pairs", f"{family}Model", **both),
        _case(f"{prefix}siglip_text", f"{family}TextModel", **pooled),
        _case(
            f"{prefix}siglip_vision",
            f"{family}VisionModel",
            options=ways,
            supports=images,
            **{**pooled, "outputs": _STATES},
        ),
        _case(f"{prefix}siglip_images", f"{family}ForImageClassification", outputs=("logits",), supports=images),
    ]


def cases() -> list[Case]:
    """Return a case for every class."""
    towers = Supports(tensor_parallel=(1, 2, 3, 4), sequence=True)
    pooled: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state", "pooler_output")}
    projected: dict[str, Any] = {"loss": projected_loss}
    larger: dict[str, Any] = {**projected, "inputs": partial(inputs, size=12)}
    both: dict[str, Any] = {
        "outputs": ("logits_per_image", "logits_per_text", "text_embeds", "image_embeds"),
        "layers": "vision_model.encoder.layers",
        "parts": ("text_model", "vision_model"),
        "options": {"attn_implementation": ("eager", "sdpa")},
        "refuses": ({"heads": 1},),
        "supports": replace(towers, pipeline=False),  # what comes of the images would have to pass by the texts
    }
    return [
        _case("contrastive", "CLIPModel", **both),
        _case("text", "CLIPTextModel", **pooled),
        _case("text_projection", "CLIPTextModelWithProjection", outputs=("text_embeds",), **projected),
        _case("vision", "CLIPVisionModel", **pooled),
        _case("larger_images", "CLIPVisionModelWithProjection", outputs=("image_embeds",), **larger),
        _case("image_classification", "CLIPForImageClassification", outputs=("logits",)),
        *_siglip("Siglip", "", pooled, both),
        *(_siglip("Siglip2", "second_", pooled, both) if _HAS_SECOND else []),
    ]
