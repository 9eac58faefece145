"""Tiny thinkers of Qwen-Omni, and their towers, for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from shard_vlm.cases import tower_loss
from shard_vlm.sizes import FAMILIES, IMAGE, LANGUAGE, PATCHES, SPLIT, STATES, TOWER
from shardcore_testing import Case, text_batch, tiny

_BANDS, _SPECTRA = 8, 24
#: Where ids begin that are no text.
_MARKS = 92
_HEARD, _BEGINS, _ENDS = 93, 94, 95  # a sound, and what is around it
_IDS: dict[str, int] = {
    **dict.fromkeys(("audio_token_id", "audio_token_index"), _HEARD),
    **dict.fromkeys(("image_token_id", "image_token_index"), IMAGE),
    **dict.fromkeys(("video_token_id", "video_token_index"), 96),
    "audio_start_token_id": _BEGINS,
    "audio_end_token_id": _ENDS,
    "vision_start_token_id": 97,
    "vision_end_token_id": 98,
}
_SOUNDS: dict[str, Any] = {
    "num_mel_bins": _BANDS,
    "d_model": 48,
    "encoder_layers": 2,
    "encoder_ffn_dim": 37,  # divides by no number of ranks
    "max_source_positions": 16,
    "output_dim": 64,
    "downsample_hidden_size": 6,
}
#: The module of transformers, what the models inside are like, and what differs.
_FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2_5Omni": {
        "home": modeling_qwen2_5_omni,
        "like": "Qwen2_5_VL",
        "language": {"model_type": "qwen2_5_omni_text"},
        "sounds": {"n_window": 4},
        "tokens": ([6, 4, 5], [4, 5, 6], [5, 6, 4]),
        "collectives": (2, 2),
    },
    "Qwen3OmniMoe": {
        "home": modeling_qwen3_omni_moe,
        "like": "Qwen3VLMoe",
        "language": {"model_type": "qwen3_omni_moe_text"},
        "sounds": {},
        "tokens": ([3, 3, 3],) * 3,
        "collectives": (2, 4),
        "whole": ("gate",),
    },
}


def _family(name: str) -> dict[str, Any]:
    return next(own for family, own in _FAMILIES.items() if name.startswith(family))


def build(name: str, *, dropout: float = 0.0, seed: int = 0, heads: int = 4, **options: Any) -> Any:
    """Return a tiny model of the class ``name``, whose towers and language model have ``heads`` heads each."""
    family = _family(name)
    like = FAMILIES[family["like"]]
    kv = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
    language = {**LANGUAGE, **kv, "attention_dropout": dropout, **like["language"], **family["language"]}
    images = {**TOWER, **like["tower"], "num_heads": heads}
    images = {key: value for key, value in images.items() if key not in ("model_type", "num_attention_heads")}
    sounds = {**_SOUNDS, **family["sounds"], "encoder_attention_heads": heads}
    parts = {"TextModel": language, "VisionEncoder": images, "AudioEncoder": sounds}
    thinker = {"audio_config": sounds, "vision_config": images, "text_config": language, **_IDS}
    settings = next((part for kind, part in parts.items() if name.endswith(kind)), thinker)
    kind = getattr(family["home"], name)
    model = tiny(kind, seed=seed, **{"attn_implementation": "eager", **settings, **options})
    if "Moe" in name:
        model.set_experts_implementation("eager")  # the default multiplies in no float64
    for path, parameter in model.named_parameters():
        if "audio_bos_eos_token" in path:  # no call reads it
            parameter.requires_grad_(False)
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids (3, N) that begin with those of a sound and of an image, both of them, and labels."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__.removeprefix("FSDP")
    family = _family(name)
    lengths = torch.tensor([24, 17, 20]).roll(-(seed % 3))
    heard = torch.arange(_SPECTRA) < lengths[:, None]
    spectra = torch.randn(3, _BANDS, _SPECTRA, generator=generator, dtype=torch.float64) * heard[:, None]
    patches = torch.randn(3 * 16, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
    grid = torch.tensor([[1, 4, 4]] * 3)
    if name.endswith("AudioEncoder"):
        # The frames of all sounds follow each other, so that no row of a batch could be taken: there is one.
        together = spectra.permute(0, 2, 1)[heard].permute(1, 0)
        return {"feature_lens": lengths.sum(0, keepdim=True), "input_features": together}
    if name.endswith("VisionEncoder"):
        return {"grid_thw": grid, "hidden_states": patches}
    seen = [97, *[IMAGE] * 4, 98]
    rows = [[_BEGINS, *[_HEARD] * count, _ENDS, *seen] for count in family["tokens"][seed % 3]]
    texts = torch.randint(1, _MARKS, (3, 7), generator=generator).tolist()
    rows = [row + text[:kept] for row, text, kept in zip(rows, texts, ([7, 4, 6] * 2)[seed % 3 :], strict=False)]
    longest = 8 + 6 + 7
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    batch = {
        "input_ids": ids,
        "attention_mask": (ids > 0).long(),
        "input_features": spectra,
        "feature_attention_mask": heard.long(),
        "pixel_values": patches,
        "image_grid_thw": grid,
    }
    if name.endswith("ForConditionalGeneration"):
        batch["labels"] = ids.masked_fill((ids == 0) | (ids >= _MARKS), -100)
    return batch


def _case(name: str, kind: str, **fields: Any) -> Case:
    own = _family(kind)
    settings: dict[str, Any] = {
        "inputs": inputs,
        "sharded": ("q_proj", "v_proj", "embed_tokens"),
        "whole": own.get("whole", ()),
        "options": {"attn_implementation": ("eager", "sdpa")},
        "refuses": ({"heads": 1},),
        "collectives": own["collectives"],
        "supports": FAMILIES[own["like"]]["supports"],
        **fields,
    }
    return Case(name=name, build=partial(build, kind), **settings)


def cases() -> list[Case]:
    """Return a case for every class, in the releases in which they are served."""
    if Version(transformers.__version__) < Version("5.23"):
        return []
    found = []
    for family, own in _FAMILIES.items():
        name, thinker = family.lower(), f"{family}Thinker"
        supports = FAMILIES[own["like"]]["supports"]
        text = replace(SPLIT, sequence=supports.sequence, context=supports.sequence, experts=supports.experts)
        alone = replace(PATCHES, sequence=False, dropout=False)
        images = ("qkv",) if "Moe" in family else ("attn.q",)
        found += [
            _case(
                f"{name}_generation",
                f"{thinker}ForConditionalGeneration",
                outputs=("logits",),
                layers="model.language_model.layers",
                supports=replace(supports, generation=True),
            ),
            _case(f"{name}_model", f"{thinker}Model", layers="language_model.layers", **STATES),
            _case(
                f"{name}_text",
                f"{thinker}TextModel",
                layers="layers",
                **{**STATES, "inputs": text_batch},
                supports=text,
            ),
            _case(
                f"{name}_images",
                f"{family}VisionEncoder",
                **{**STATES, "loss": tower_loss, "sharded": images, "supports": alone, "whole": ()},
                collectives=(2, 3 if "Moe" in family else 2),  # the bias of queries, keys and values together
            ),
            _case(
                f"{name}_sounds",
                f"{family}AudioEncoder",
                **{**STATES, "sharded": ("q_proj", "out_proj", "fc1"), "supports": alone, "whole": ()},
                layers="layers",
                collectives=(2, 2),
            ),
        ]
    return found
