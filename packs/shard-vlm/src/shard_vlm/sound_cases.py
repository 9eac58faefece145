"""Tiny models of sounds and text for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from shard_vlm.sizes import LANGUAGE, MARKS, SPLIT, STATES
from shardcore_testing import Case, tiny

_BANDS, _SPECTRA, _SOUND = 8, 24, 97
_TOWER: dict[str, Any] = {
    "num_mel_bins": _BANDS,
    "hidden_size": 48,
    "intermediate_size": 37,  # divides by no number of ranks
    "num_hidden_layers": 2,
    "max_source_positions": _SPECTRA // 2,
    "max_position_embeddings": _SPECTRA // 2,
}
#: By what the names of classes begin with: what differs in the tower, the language model, and how many of the states of
#: a sound, of which there is one for two spectra, make a token.
_FAMILIES: dict[str, dict[str, Any]] = {
    "AudioFlamingo3": {"language": "qwen2", "tokens": 2},
    "GlmAsr": {"tower": {"intermediate_size": 192}, "language": "llama", "tokens": 4},
    "MusicFlamingo": {"tower": {"model_type": "audioflamingo3_encoder"}, "language": "qwen2", "tokens": 2},
    "Qwen2Audio": {"language": "qwen2", "tokens": 2, "mask": "feature_attention_mask"},
    "Voxtral": {"tower": {"intermediate_size": 96}, "language": "llama", "tokens": 2, "mask": None},
}


def _family(name: str) -> dict[str, Any]:
    return next(own for family, own in _FAMILIES.items() if name.startswith(family))


def build(name: str, *, dropout: float = 0.0, seed: int = 0, heads: int = 4, **options: Any) -> Any:
    """Return a tiny model of the class ``name``, whose tower and language model have ``heads`` heads each."""
    family = _family(name)
    drawn = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), dropout)
    tower = {**_TOWER, "num_attention_heads": heads, **drawn, **family.get("tower", {})}
    if name.endswith("Encoder"):
        settings = tower
    else:
        kv = {"num_attention_heads": heads, "num_key_value_heads": heads}
        language = {**LANGUAGE, **kv, "attention_dropout": dropout, "model_type": family["language"]}
        ids = {"audio_token_id": _SOUND, "audio_token_index": _SOUND}
        rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 12.0, "partial_rotary_factor": 0.25}}
        joined = rope if name.startswith("Music") else {}
        settings = {"audio_config": tower, "text_config": language, **ids, **joined}
    return tiny(getattr(transformers, name), seed=seed, **{"attn_implementation": "eager", **settings, **options})


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded spectra (3, 8, 24), and ids that begin with the tokens of the sound, with labels."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__.removeprefix("FSDP")
    family, mask = _family(name), _family(name).get("mask", "input_features_mask")
    lengths = torch.tensor([24, 17, 20] if mask else [24, 24, 24]).roll(seed)
    heard = (torch.arange(_SPECTRA) < lengths[:, None]).long()
    spectra = torch.randn(3, _BANDS, _SPECTRA, generator=generator, dtype=torch.float64) * heard[:, None]
    batch = {"input_features": spectra}
    if name.endswith("Encoder"):
        return {**batch, mask: heard} if name.startswith("AudioFlamingo3") else batch
    tokens = ((lengths - 1) // 2 + 1) // family["tokens"]
    ends = tokens + torch.tensor([7, 4, 6]).roll(seed)
    places = torch.arange(int(tokens.max()) + 7)
    ids = torch.randint(1, MARKS, (3, len(places)), generator=generator)
    ids = torch.where(places < tokens[:, None], _SOUND, ids) * (places < ends[:, None])
    batch |= {"input_ids": ids, "attention_mask": (ids > 0).long(), **({mask: heard} if mask else {})}
    if name.endswith("ForConditionalGeneration"):
        batch["labels"] = ids.masked_fill((ids == 0) | (ids == _SOUND), -100)
    return batch


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "sharded": ("q_proj", "v_proj", "embed_tokens"),
        "options": {"attn_implementation": ("eager", "sdpa")},
        "refuses": ({"heads": 1},),
        "supports": SPLIT,
        **fields,
    }
    return Case(name=name, build=partial(build, kind), **settings)


def cases() -> list[Case]:
    """Return a case for every class, and for every tower."""
    found = []
    for family in _FAMILIES:
        name = family.lower()
        found += [
            _case(
                f"{name}_generation",
                f"{family}ForConditionalGeneration",
                outputs=("logits",),
                layers="model.language_model.layers",
                # Qwen2-Audio puts labels beside its words itself, so that nobody sees which of them count.
                supports=replace(SPLIT, generation=True, micro_batches=family != "Qwen2Audio"),
            ),
            _case(f"{name}_model", f"{family}Model", layers="language_model.layers", **STATES),
        ]
        if hasattr(transformers, f"{family}Encoder"):
            tower = {"layers": "layers", "sharded": ("q_proj", "out_proj" if family != "GlmAsr" else "o_proj", "fc1")}
            divided = replace(SPLIT, context=family == "GlmAsr")
            found.append(_case(f"{name}_tower", f"{family}Encoder", **{**tower, **STATES, "supports": divided}))
    return found
