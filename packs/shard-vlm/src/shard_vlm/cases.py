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

from shard_vlm.sizes import FAMILIES, IMAGE, LANGUAGE, MARKS, PATCHES, SOUNDS, SPLIT, STATES, TEXT, TEXTS, TOWER, TOWERS
from shardcore_testing import Case, hidden_loss, text_batch, tiny, weighted_mean


def _family(name: str) -> dict[str, Any]:
    inside = {**TOWERS, **TEXTS}.get(name)
    return FAMILIES[inside or name.partition("For")[0].removesuffix("Model")]


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
    tower = {**TOWER, **family["sounds" if "Audio" in name else "tower"]}
    language = {**LANGUAGE, **kv, "attention_dropout": dropout, **family["language"]}
    language |= {"hidden_size_per_layer_input": beside} if name.startswith("Gemma4") else {}
    if name in TOWERS:
        settings = {**tower, **dict.fromkeys(("num_attention_heads", "num_heads"), heads), "attention_dropout": dropout}
    elif name in TEXTS:
        settings = language
    else:
        # Families call the id of an image one or the other.
        ids = dict.fromkeys(("image_token_id", "image_token_index"), IMAGE)
        settings = {"vision_config": tower, "text_config": language, **ids, **family["joined"]}
    model = tiny(_class(name), seed=seed, **{"attn_implementation": "eager", **settings, **options})
    if "Moe" in name and name not in TOWERS:
        model.set_experts_implementation("eager")  # the default multiplies in no float64
    with torch.no_grad():
        for module in model.modules():
            if "Norm" in (kind := type(module).__name__) and "Gemma" in kind and "Gemma4" not in kind:
                module.weight.sub_(1)  # they multiply by 1 + weight
    for path, parameter in model.named_parameters():
        if name not in TOWERS and any(part in path for part in family.get("unused", ())):
            parameter.requires_grad_(False)
    return model


def _images(name: str, ids: Tensor, generator: torch.Generator) -> dict[str, Tensor]:
    """Return three images of 8 x 8, in pieces where a family cuts them, or 16 patches of each one after another."""
    if name.startswith("Qwen"):
        patches = torch.randn(3 * 16, 3 * 2 * 4 * 4, generator=generator, dtype=torch.float64)
        grid = torch.tensor([[1, 4, 4]] * 3)
        if name in TOWERS:
            return {"grid_thw": grid, "hidden_states": patches}
        return {"pixel_values": patches, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).long()}
    if name.startswith("Gemma4"):
        places = torch.cartesian_prod(torch.arange(4), torch.arange(4)).expand(3, -1, -1).contiguous()
        patches = torch.rand(3, 16, 12, generator=generator, dtype=torch.float64)
        if name in TOWERS:
            return {"pixel_values": patches, "pixel_position_ids": places}
        return {"pixel_values": patches, "image_position_ids": places, "mm_token_type_ids": (ids == IMAGE).long()}
    family = _family(name)
    pieces = (family["pieces"],) if "pieces" in family and name not in TOWERS else ()
    images = {"pixel_values": torch.randn(3, *pieces, 3, 8, 8, generator=generator, dtype=torch.float64)}
    if "size" in family and name not in TOWERS:
        images["image_sizes"] = torch.tensor([family["size"]] * 3)
    if name.startswith(("Gemma3", "PaliGemma")):  # tokens of images see each other; PaliGemma's text does so by itself
        images["token_type_ids"] = (ids == IMAGE).long() * name.startswith("Gemma3")
    return images


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return right-padded ids (3, N + 7) that begin with the N tokens of an image, the images, and labels."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__.removeprefix("FSDP")
    lengths = torch.tensor([7, 4, 6]).roll(seed)
    mask = (torch.arange(TEXT) < lengths[:, None]).long()
    ids = torch.randint(1, MARKS, (3, TEXT), generator=generator) * mask
    if name == "Gemma4AudioModel":
        sounds = torch.randn(3, 24, 8, generator=generator, dtype=torch.float64)
        return {"input_features": sounds, "attention_mask": torch.arange(24) < 2 * lengths[:, None]}
    if name in TOWERS:
        return _images(name, ids, generator)
    seen = torch.full((3, _family(name).get("tokens", 4)), IMAGE)
    ids, mask = torch.cat([seen, ids], 1), torch.cat([torch.ones_like(seen), mask], 1)
    batch = {"input_ids": ids, "attention_mask": mask, **_images(name, ids, generator)}
    if name.endswith("ForSequenceClassification"):
        batch["labels"] = torch.randint(0, 2, (3,), generator=generator)
    if name.endswith("ForConditionalGeneration"):
        batch["labels"] = ids.masked_fill((mask == 0) | (ids == IMAGE), -100)
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
        "supports": own.get("supports", SPLIT),
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
    for family, own in FAMILIES.items():
        name, kind = family.lower(), f"{family}ForConditionalGeneration"
        supports = own.get("supports", SPLIT)
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
            _case(f"{name}_model", f"{family}Model", own, layers=layers, **STATES),
        ]
    kind, own = "Gemma3ForSequenceClassification", FAMILIES["Gemma3"]
    layers = "model.language_model.layers"
    found.append(_case("gemma3_sequence_classification", kind, own, outputs=("logits",), layers=layers))
    kind, own = "Gemma4ForConditionalGeneration", FAMILIES["Gemma4"]
    small = _case("gemma4_small_generation", kind, own, outputs=("logits",), layers=layers)
    # The model reads the table of words by itself, which is whole then, and hands a part to each block.
    alone = replace(SPLIT, sequence=False, generation=True, pipeline=False)
    beside = partial(build, kind, beside=6)
    found.append(replace(small, build=beside, sharded=("q_proj", "v_proj"), whole=("per_layer",), supports=alone))
    for kind, family in TEXTS.items():
        own = FAMILIES[family]
        together = own["supports"].sequence
        supports = replace(SPLIT, sequence=together, context=together, experts=own["supports"].experts)
        found.append(_case(f"{family.lower()}_text", kind, own, inputs=text_batch, supports=supports, **STATES))
    for kind, family in TOWERS.items():
        patches = family.startswith("Qwen")
        options = {"attn_implementation": ("eager", "sdpa"), **FAMILIES[family].get("switches", {})}
        fields = {
            **STATES,
            "options": options,
            "loss": tower_loss,
            "sharded": ("qkv",) if patches else ("q_proj", "v_proj"),
        }
        if family in ("Gemma4", "Mistral3") and "Audio" not in kind:
            fields["loss"] = even_loss
        supports = replace(PATCHES, sequence=False, dropout=False) if patches else SPLIT
        if "Audio" in kind:
            found.append(_case("gemma4_sounds", kind, SOUNDS, **{**fields, "options": {}}))
            continue
        # The bias of queries, keys and values together is one more.
        cost = {"collectives": (2, 3) if patches or family == "Gemma4" else (2, 2)}
        found.append(_case(f"{family.lower()}_tower", kind, cost, supports=supports, **fields))
    return found
