"""How a small model of transformers is called: random arguments, the same in every process."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.errors import ConfigError
from shardcore_planner.calls import labels_of
from shardcore_scaffold.arguments import FIXED, MAKERS, completed, patches_of

#: Classes of a head.
LABELS = 3
#: Tokens below it are special ones.
FIRST_WORD = 24
_WORDS, _ROWS, _TOKENS, _CHOICES = 97, 2, 9, 2
_FRAMES = 64  # of a spectrogram
_MEDIA = ("pixel_values", "pixel_values_videos", "input_features", "input_values")


def calls(model: Any, seed: int = 0, *, media: bool = True) -> Iterator[dict[str, Any]]:
    """Yield arguments of calls that a model may take, the likeliest first.

    Images and sounds come with as many tokens in the text as the model makes features of them; without ``media`` there
    is text alone, and nothing for a model that takes no text.

    Raises:
        ConfigError: it takes something that is not known, or cannot be called as a whole.
    """
    if type(model).forward is nn.Module.forward:
        raise ConfigError(f"{type(model).__name__} has no forward: only its parts are called")
    makes = _Calls(model, seed)
    if makes.main not in {"input_ids", *_MEDIA, *MAKERS}:
        raise ConfigError(f"{type(model).__name__} takes {makes.main!r}, and it is not known how to make that")
    plain = []
    for found in makes.plain(media):
        plain.append({**found})
        yield found
    for found in plain:
        yield from completed(found, makes)


def media_of(model: Any) -> list[str]:
    """Return the arguments by which a model takes images, videos and sounds."""
    takes = inspect.signature(model.forward).parameters
    return [name for name in _MEDIA if name in takes]


def like(inputs: Mapping[str, Any], model: Any, seed: int) -> dict[str, Any]:
    """Return arguments as those of a call that is known, with other numbers and words; special tokens stay."""
    generator = torch.Generator().manual_seed(seed)
    words = _words(model.config)
    found = dict(inputs)
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name not in FIXED:
            found[name] = torch.randn(value.shape, generator=generator, dtype=value.dtype)
        elif isinstance(value, Tensor) and name.endswith("input_ids"):
            other = torch.randint(min(FIRST_WORD, words - 1), words, value.shape, generator=generator)
            found[name] = torch.where(value < FIRST_WORD, value, other)
    tokens = [found[name] for name in ("input_ids", "decoder_input_ids", "labels") if name in found]
    rows = (tokens or list(found.values()))[0]
    own = labels_of(type(model).__name__.removeprefix("FSDP"), len(rows), rows)
    return found | _fitting({key: value for key, value in own.items() if key in inputs}, model)


def _words(config: Any) -> int:
    parts = [getattr(config, name, None) for name in ("text_config", "llm_config", "decoder", "model_config")]
    sizes = [getattr(part, "vocab_size", None) for part in (*parts, config)]
    return next((size for size in sizes if type(size) is int and size), _WORDS)


class _Calls:
    def __init__(self, model: Any, seed: int) -> None:
        self.model, self.config = model, model.config
        self.generator = torch.Generator().manual_seed(seed)
        self.takes = inspect.signature(model.forward).parameters
        self.name, self.rows, self.tokens = type(model).__name__, _ROWS, _TOKENS
        main = model.main_input_name
        self.main = main if isinstance(main, str) else main[0]

    def plain(self, media: bool) -> Iterator[dict[str, Any]]:
        """Yield what most models take: text, images and sounds; without ``media`` text alone."""
        text = self.main == "input_ids"
        if not media:
            yield from self.with_text({}, True) if text else ()
            return
        # Without its images, a model of images is another one.
        for found in list(self.media()) or [dict[str, Any]()]:
            for texts in (True, False) if found and not text and "input_ids" in self.takes else (text,):
                yield from self.with_text({**found}, texts)

    def media(self) -> Iterator[dict[str, Any]]:
        """Yield images, videos and sounds in the forms that models take them."""
        config, main = self.config, self.main
        vision = getattr(config, "vision_config", None)
        looks = vision is not None or main == "pixel_values" or hasattr(config, "image_size")
        if "pixel_values" in self.takes and looks:
            yield from self._images(vision or config)
            for side in () if hasattr(vision or config, "image_size") else (64, 96):
                yield from self._images(vision or config, side)
            for name in ("backbone_config", "encoder"):  # whose images are of another size, maybe
                if hasattr(getattr(config, name, None), "image_size"):
                    yield from self._images(getattr(config, name))
        if main == "pixel_values_videos":
            yield from ({main: found["pixel_values"]} for found in self._images(vision or config))
        if main == "input_values":
            yield from ({main: self.numbers(_ROWS, samples)} for samples in (1600, 6400))
            yield {main: self.numbers(_ROWS, 1, 1600)}
            if hasattr(config, "num_mel_bins"):
                yield {main: self.numbers(_ROWS, getattr(config, "max_length", _FRAMES), config.num_mel_bins)}
        if main == "input_features" or ("input_features" in self.takes and getattr(config, "audio_config", None)):
            yield from self._sounds()

    def with_text(self, found: dict[str, Any], text: bool) -> Iterator[dict[str, Any]]:
        """Yield arguments with what else the model takes: tokens, and what its head learns from."""
        rows = self.ids()
        if "noise" in self.takes and hasattr(self.config, "mask_ratio"):  # by which patches are masked, else drawn
            found["noise"] = self.numbers(_ROWS, patches_of(self.config))
        if text:
            try:
                rows = self._with_features(rows, found)
            except Exception as error:  # it does not take these images
                self.failed = error
            if self.name.endswith("MultipleChoice"):
                rows = torch.stack([self.ids() for _ in range(_CHOICES)], 1)
            found["input_ids"] = rows
            if "attention_mask" in self.takes:
                found["attention_mask"] = torch.ones_like(rows)
            for name in ("token_type_ids", "mm_token_type_ids"):
                if name in self.takes and found.keys() & {"pixel_values", "input_features"}:
                    found[name] = (rows == self._token("image")).long()
        decoder = {"decoder_input_ids": self.ids()} if "decoder_input_ids" in self.takes else {}
        own = labels_of(self.name, _ROWS, rows)
        labels = _fitting({key: value for key, value in own.items() if key in self.takes}, self.model)
        if not labels and decoder:
            yield found | decoder
        if labels:
            yield found | labels
            if decoder:
                yield found | labels | decoder
        yield found
        if decoder:
            yield found | decoder

    def ids(self) -> Tensor:
        words, end = _words(self.config), getattr(self.config, "eos_token_id", None)
        rows = torch.randint(min(FIRST_WORD, words - 1), words, (_ROWS, _TOKENS), generator=self.generator)
        if self.name.endswith("SequenceClassification") and type(end) is int and end < FIRST_WORD:
            rows[:, -1] = end  # where some look for what they classify
        return rows

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def _token(self, kind: str) -> int:
        names = [f"{kind}_token_{end}" for end in ("id", "index", "idx")]
        return next((getattr(self.config, name) for name in names if getattr(self.config, name, None) is not None), -1)

    def _with_features(self, rows: Tensor, media: Mapping[str, Any]) -> Tensor:
        """Return rows with a token for each feature that the model makes of what is beside the text."""
        for kind, get, main in (
            ("image", "get_image_features", "pixel_values"),
            ("audio", "get_audio_features", "input_features"),
        ):
            helper = getattr(self.model, get, getattr(getattr(self.model, "model", None), get, None))
            token = self._token(kind)
            if main not in media or helper is None or token < 0:
                continue
            wants = inspect.signature(helper).parameters
            given = {name: value for name, value in media.items() if name in wants}
            given |= {name: make(self) for name, make in MAKERS.items() if name in wants and name in self.takes}
            with torch.no_grad():
                features = helper(**given)
            features = getattr(features, "pooler_output", features)
            parts = [features] if isinstance(features, Tensor) else list(features)
            each = sum(part.numel() // part.shape[-1] for part in parts) // len(rows)
            tokens = torch.full((len(rows), each), token)
            start = self._token("vision_start")
            before = [torch.full((len(rows), 1), start)] if start >= 0 else []
            rows = torch.cat([rows[:, :1], *before, tokens, rows[:, 1:]], 1)
        return rows

    def _images(self, vision: Any, usual: int = 32) -> Iterator[dict[str, Any]]:
        size, patch = getattr(vision, "image_size", None) or usual, getattr(vision, "patch_size", None) or 4
        height, width = (size, size) if isinstance(size, int) else size
        side = patch if isinstance(patch, int) else patch[0]
        channels = getattr(vision, "num_channels", None) or getattr(vision, "in_channels", None) or 3
        if "image_grid_thw" in self.takes:  # a row for each patch, in any number of images
            merged = getattr(vision, "spatial_merge_size", 2)
            grid = torch.tensor([[1, 2 * merged, 2 * merged]] * _ROWS)
            frames = getattr(vision, "temporal_patch_size", 1)
            yield {
                "pixel_values": self.numbers(int(grid.prod(1).sum()), channels * frames * side * side),
                "image_grid_thw": grid,
            }
            return
        if "spatial_shapes" in self.takes:
            many = height // side
            yield {
                "pixel_values": self.numbers(_ROWS, many * many, channels * side * side),
                "pixel_attention_mask": torch.ones(_ROWS, many * many, dtype=torch.long),
                "spatial_shapes": torch.tensor([[many, many]] * _ROWS),
            }
            return
        frames = getattr(vision, "num_frames", None) or getattr(vision, "frames_per_clip", None) or 2
        shapes = [(channels, height, width), (1, channels, height, width), (frames, channels, height, width)]
        sizes = {"image_sizes": torch.tensor([[height, width]] * _ROWS)}
        for shape in shapes:
            yield {"pixel_values": self.numbers(_ROWS, *shape)}
            if "image_sizes" in self.takes:
                yield {"pixel_values": self.numbers(_ROWS, *shape), **sizes}

    def _sounds(self) -> Iterator[dict[str, Any]]:
        parts = [getattr(self.config, name, None) for name in ("audio_config", "encoder_config", "speech_encoder")]
        parts = [part for part in (*parts, self.config) if part is not None]
        names = (
            "num_mel_bins",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            "input_feat_size",
            "feature_size",
            "input_dim",
        )
        found = [getattr(part, name, None) for part in parts for name in names]
        widths = dict.fromkeys(each for each in found if type(each) is int) or {16: None}
        places = [getattr(part, "max_source_positions", None) for part in parts]
        frames = next((2 * each for each in places if type(each) is int), _FRAMES)
        mask = {}
        for name in ("feature_attention_mask", "input_features_mask"):
            if name in self.takes:
                mask[name] = torch.ones(_ROWS, frames, dtype=torch.long)
        for width in (*widths, *(4 * width for width in widths)):  # of frames, and of some that are stacked
            yield {"input_features": self.numbers(_ROWS, width, frames), **mask}
            yield {"input_features": self.numbers(_ROWS, frames, width), **mask}


def _fitting(labels: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """Return labels that the head of a model has classes for."""
    name, config = type(model).__name__.removeprefix("FSDP"), model.config
    if name.endswith("TokenClassification") and "labels" in labels:
        return labels | {"labels": labels["labels"] % config.num_labels}
    if name.endswith("PreTraining") and "labels" in labels and model.get_output_embeddings() is None:
        return labels | {"labels": labels["labels"] % 2}  # whether a token was replaced
    return labels
