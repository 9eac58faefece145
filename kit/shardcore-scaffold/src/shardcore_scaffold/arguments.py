"""Arguments beside text, images and sounds that models of transformers are called with, by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardcore.errors import ConfigError

__all__ = ["FIXED", "MAKERS", "completed", "patches_of"]

_FEATURES = 4  # of an image, where they are given
_PATCHES = 256  # of the tiles of an image, at most
#: What says where something is: other numbers are other places, of which there may be none.
FIXED = {"bbox", "flattened_patches", "freq", "image_attention_mask"}


def _inputs(makes: Any) -> Any:
    size = getattr(makes.config, "image_size", None)
    if makes.name.endswith(("MaskedLM", "SequenceClassification")):
        return makes.ids()
    return makes.numbers(makes.rows, 3, size, size) if size else makes.numbers(makes.rows, 6400)


def _series(makes: Any) -> Any:
    length = getattr(makes.config, "context_length", 64)
    channels = getattr(makes.config, "num_input_channels", None)
    return makes.numbers(makes.rows, length, channels) if channels else list(makes.numbers(makes.rows, length))


def _boxes(makes: Any) -> Tensor:
    corners = torch.rand(makes.rows, makes.tokens, 4, generator=makes.generator, dtype=torch.float64) / 2
    return corners + torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64)  # the second below and right of the first


def _flat(makes: Any) -> Any:
    patches = makes.numbers(makes.rows, 9, 2 + makes.config.vision_config.patch_embed_hidden_size)
    places = torch.cartesian_prod(torch.arange(1, 4), torch.arange(1, 4))  # of three rows and three columns
    patches[..., :2] = places
    return patches


def _masked(makes: Any) -> Tensor:
    config = makes.config
    patches = (config.image_size // config.patch_size) ** 2 * (config.num_frames // config.tubelet_size)
    return (torch.arange(patches) % 2 == 0).expand(makes.rows, -1)


def patches_of(config: Any) -> int:
    """Return how many patches, or units of them, are masked or not in an image."""
    side, patch, unit = config.image_size, getattr(config, "patch_stride", config.patch_size), 1
    if isinstance(side, list | tuple):
        side, patch = side[0], patch[0]
    if hasattr(config, "masked_unit_size"):
        unit = config.masked_unit_size[0]
    return int((side // patch // unit) ** 2)


def _tiles(makes: Any) -> int:
    parts = (getattr(makes.config, "vision_config", makes.config), makes.config)
    return next((part.max_num_tiles for part in parts if hasattr(part, "max_num_tiles")), 1)


def _images(makes: Any) -> Any:
    config = getattr(makes.config, "vision_config", makes.config)
    patches = _tiles(makes) * (config.image_size // config.patch_size) ** 2
    if patches > _PATCHES:
        raise ConfigError(f"images of {patches} patches are not small")
    return makes.numbers(makes.rows, 1, _tiles(makes), 3, config.image_size, config.image_size)


#: Names of arguments -> what makes one of them; it has the configuration, the numbers of rows and tokens, and makers of
#: ``numbers(*shape)`` and of ``ids()``.
MAKERS: dict[str, Callable[[Any], Any]] = {
    "aspect_ratio_ids": lambda makes: torch.ones(makes.rows, 1, dtype=torch.long),
    "aspect_ratio_mask": lambda makes: torch.ones(makes.rows, 1, _tiles(makes), dtype=torch.long),
    "bbox": _boxes,
    "bool_masked_pos": _masked,
    "decoder_input_values": lambda makes: makes.numbers(makes.rows, makes.tokens - 1, makes.config.num_mel_bins),
    "flattened_patches": _flat,
    "freq": lambda makes: [0] * makes.rows,
    "image_attention_mask": lambda makes: torch.ones(makes.rows, makes.tokens, 1, dtype=torch.long),
    "image_embeds_position_mask": lambda makes: (
        torch.arange(makes.tokens).expand(makes.rows, -1) < makes.config.latent_query_num
    ),
    "inputs": _inputs,
    "marks": lambda makes: torch.tensor([[2, 4]] * makes.rows),
    "num_options": lambda makes: torch.tensor([[2, 2]] * makes.rows),
    "past_values": _series,
    "qformer_input_ids": lambda makes: makes.ids(),
    "question_type_ids": lambda makes: torch.tensor([[0, 1]] * makes.rows),
    "task_inputs": lambda makes: makes.numbers(makes.rows, makes.config.task_seq_len),
    "use_cache": lambda makes: False,
    "visual_feats": lambda makes: makes.numbers(makes.rows, _FEATURES, makes.config.visual_feat_dim),
    "visual_pos": lambda makes: makes.numbers(makes.rows, _FEATURES, makes.config.visual_pos_dim),
}


def completed(found: Mapping[str, Any], makes: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments ``found`` with all others of `MAKERS` that the model takes, and its marks in the text."""
    more = dict(found)
    for name, make in MAKERS.items():
        if name in makes.takes and name not in found:
            more[name] = make(makes)
    if "aspect_ratio_ids" in makes.takes:
        more["pixel_values"] = _images(makes)
    rows = more.get("input_ids")
    if rows is not None:
        rows = more["input_ids"] = rows.clone()
        for at, mark in enumerate(("sep", "sep", "sep", "question")):
            token = getattr(makes.config, f"{mark}_token_id", None)
            if isinstance(token, int) and rows.shape[-1] > at + 2:
                rows[..., at + 1] = token
    if more.keys() != found.keys() or (rows is not None and not torch.equal(rows, found["input_ids"])):
        yield more
    if rows is not None and "input_features" in more:  # a word for each feature
        text = ("input_ids", "attention_mask", "labels")
        yield more | {name: more[name][..., :-1] for name in text if name in more}
    books = getattr(getattr(makes.config, "decoder", makes.config), "num_codebooks", None)
    if isinstance(books, int):  # a row of tokens for each, or a column
        coded = "decoder_input_ids" if "decoder_input_ids" in makes.takes else "input_ids"
        rows = makes.ids()
        bare = {name: value for name, value in more.items() if name != "labels"}
        yield bare | {coded: rows.repeat_interleave(books, 0)}
        yield bare | {coded: rows[..., None].expand(-1, -1, books + 1)}
