"""The models of the draws, in float64 with random parameters, and their batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draws import Draw

__all__ = ["Between", "batch_of", "build", "part_of", "prompt_of"]

#: Settings of every model of a library: no dropout, small tables of positions.
_USUAL: dict[str, dict[str, Any]] = {
    "llama": {
        "max_position_embeddings": 32,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
    },
    "bert": {
        "max_position_embeddings": 32,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
    },
    "vit": {
        "patch_size": 4,
        "encoder_stride": 4,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "whisper": {
        "num_mel_bins": 6,
        "max_target_positions": 24,
        "classifier_proj_size": 10,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "activation_dropout": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
        "eos_token_id": 2,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    "timm": {"patch_size": 4},
}
_USUAL |= {"mixtral": _USUAL["llama"], "qwen3_moe": {**_USUAL["llama"], "decoder_sparse_step": 1}}
_VISION = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 8,
    "patch_size": 4,
}
_CONFIGS = {
    "llama": "LlamaConfig",
    "bert": "BertConfig",
    "vit": "ViTConfig",
    "whisper": "WhisperConfig",
    "mixtral": "MixtralConfig",
    "qwen3_moe": "Qwen3MoeConfig",
}


def build(draw: Draw) -> Any:
    """Return the unsharded model in the draw's dtype and in training mode; equal in every process."""
    settings = {**_USUAL[draw.family], **{k: v for k, v in draw.model.items() if k != "heads_of"}}
    model = _timm(draw.cls, settings) if draw.family == "timm" else _transformers(draw, settings)
    generator = torch.Generator().manual_seed(draw.number)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            middle = float("norm" in name.lower() and name.endswith("weight"))
            parameter.copy_(middle + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.to(getattr(torch, draw.dtype)).train()
    for parameter in model.parameters():
        if draw.frozen and float(torch.rand((), generator=generator)) < draw.frozen:
            parameter.requires_grad_(False)
    return model


def _transformers(draw: Draw, settings: dict[str, Any]) -> nn.Module:
    import transformers

    if "frames" in settings:
        settings["max_source_positions"] = settings.pop("frames") // 2
    implementation = settings.pop("experts_implementation", "")
    config = getattr(transformers, _CONFIGS[draw.family])(**settings)
    if implementation:
        config._experts_implementation = implementation
    if draw.cls == "LlavaForConditionalGeneration":
        config = transformers.LlavaConfig(
            text_config=config,
            vision_config=transformers.CLIPVisionConfig(**_VISION),
            image_token_index=settings["vocab_size"] - 1,
            tie_word_embeddings=settings["tie_word_embeddings"],
        )
    if draw.cls == "Between":
        return Between(transformers.LlamaModel(config), settings["hidden_size"])
    model = getattr(transformers, draw.cls)(config)
    if model.can_generate():
        model.generation_config.pad_token_id = 0
        model.generation_config.eos_token_id = None
    return model


class Between(nn.Module):
    """A Llama between modules that transformers does not know.

    Args:
        body: what may be sharded.
        width: of the hidden states.
    """

    def __init__(self, body: nn.Module, width: int) -> None:
        super().__init__()
        self.before, self.body, self.after = nn.Linear(5, width), body, nn.Linear(width, 3)

    def forward(self, features: Tensor, labels: Tensor, **arguments: Any) -> dict[str, Tensor]:
        """Return the loss and the logits of features (B, T, 5)."""
        logits = self.after(self.body(inputs_embeds=self.before(features), **arguments).last_hidden_state)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def _timm(cls: str, settings: dict[str, Any]) -> nn.Module:
    import timm.layers
    import timm.models.deit
    import timm.models.vision_transformer as library

    for name, home in (("mlp_layer", timm.layers), ("block_fn", library)):
        if name in settings:
            settings[name] = getattr(home, settings[name])
    return getattr(timm.models.deit if "Distilled" in cls else library, cls)(**settings)


def batch_of(draw: Draw, model: Any, seed: int, *, longer: int = 0) -> dict[str, Any]:
    """Return the arguments of one call.

    Args:
        draw: the draw.
        model: the unsharded model.
        seed: of its values.
        longer: how many tokens more it has than the draw says.
    """
    generator = torch.Generator().manual_seed(1000 * draw.number + seed)
    if draw.family == "timm":
        return {"x": _images(draw, draw.model["img_size"], generator)}
    if draw.family == "vit":
        return _vit_batch(draw, generator)
    if draw.family == "whisper":
        return _whisper_batch(draw, generator, longer)
    return _text_batch(draw, model, generator, longer)


def _images(draw: Draw, size: int, generator: torch.Generator) -> Tensor:
    return torch.randn(draw.batch["rows"], 3, size, size, generator=generator, dtype=torch.float64)


def _vit_batch(draw: Draw, generator: torch.Generator) -> dict[str, Any]:
    rows, size = draw.batch["rows"], draw.model["image_size"]
    batch: dict[str, Any] = {"pixel_values": _images(draw, size, generator)}
    if draw.cls == "ViTForImageClassification":
        batch["labels"] = torch.randint(0, draw.model["num_labels"], (rows,), generator=generator)
    if draw.cls == "ViTForMaskedImageModeling":
        masked = torch.rand(rows, (size // 4) ** 2, generator=generator) < 0.5
        masked[:, 0] = True
        batch["bool_masked_pos"] = masked
    return batch


def _labels(draw: Draw, high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    """Return labels of tokens, of which the draw leaves out some, all or none."""
    labels = torch.randint(0, high, shape, generator=generator)
    if draw.batch["labels"] == "none":
        return None
    if draw.batch["labels"] == "ignored":
        return torch.full_like(labels, -100)
    if draw.batch["labels"] == "uneven":  # rows with all, half and none of theirs
        shares = torch.tensor([0.0, 0.5, 1.0])[
            torch.randint(0, 3, (shape[0], *[1] * (len(shape) - 1)), generator=generator)
        ]
        ignored = torch.rand(shape, generator=generator) < shares
        ignored[0, ..., -1] = False
        return labels.masked_fill(ignored, -100)
    if draw.batch["labels"] == "some":
        return labels.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100)
    return labels


def _whisper_batch(draw: Draw, generator: torch.Generator, longer: int) -> dict[str, Any]:
    rows, length = draw.batch["rows"], draw.batch["length"] + longer
    vocabulary = draw.model["vocab_size"]
    features = torch.randn(rows, 6, draw.model["frames"], generator=generator, dtype=torch.float64)
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    labels = _labels(draw, vocabulary, (rows, length), generator)
    if draw.cls == "WhisperForAudioClassification":
        return {"input_features": features, "labels": ids[:, 0] % draw.model["num_labels"]}
    if draw.cls == "WhisperForCausalLM":
        states = torch.randn(rows, 5, draw.model["d_model"], generator=generator, dtype=torch.float64)
        return {"input_ids": ids, "labels": labels, "encoder_outputs": (states,), "use_cache": False}
    batch = {"input_features": features, "use_cache": False}
    if draw.cls == "WhisperModel" or labels is None:
        return {**batch, "decoder_input_ids": ids}
    return {**batch, "labels": labels}


def _text_batch(draw: Draw, model: Any, generator: torch.Generator, longer: int) -> dict[str, Any]:
    rows, length, settings = draw.batch["rows"], draw.batch["length"] + longer, draw.model
    shape = (rows, 2, length) if draw.cls == "BertForMultipleChoice" else (rows, length)
    ids = torch.randint(1, settings["vocab_size"], shape, generator=generator)
    batch: dict[str, Any] = {"input_ids": ids}
    if (mask := _mask(draw, shape, generator)) is not None:
        batch["attention_mask"] = mask
        if draw.batch["mask"] == "right":
            batch["input_ids"] = ids * mask
    if draw.batch["embeds"] and draw.cls != "LlamaForSequenceClassification":  # which needs ids to find the last token
        width = settings["hidden_size"]
        batch["inputs_embeds"] = torch.randn(*shape, width, generator=generator, dtype=torch.float64)
        del batch["input_ids"]
    if draw.family == "bert":
        batch["token_type_ids"] = torch.randint(0, 2, shape, generator=generator)
    if settings.get("add_cross_attention"):
        batch["encoder_hidden_states"] = torch.randn(
            rows, 4, settings["hidden_size"], generator=generator, dtype=torch.float64
        )
    if draw.family in ("llama", "mixtral", "qwen3_moe") or settings.get("is_decoder"):
        batch["use_cache"] = False
    batch |= _targets(draw, shape, generator)
    if draw.batch.get("items"):
        batch["num_items_in_batch"] = int(batch["labels"][..., 1:].ne(-100).sum())
    if draw.cls == "Between":
        del batch["input_ids"]
        batch["features"] = torch.randn(*shape, 5, generator=generator, dtype=torch.float64)
    if draw.cls == "LlavaForConditionalGeneration":
        image = settings["vocab_size"] - 1
        batch["input_ids"] = ids.masked_fill(ids == image, 1)
        batch["input_ids"][:, :4] = image
        batch["pixel_values"] = _images(draw, 8, generator)
    return batch


def _mask(draw: Draw, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
    kind, length = draw.batch["mask"], shape[-1]
    if kind == "none":
        return None
    mask = torch.ones(shape, dtype=torch.long)
    if kind == "holes":
        mask = (torch.rand(shape, generator=generator) < 0.7).long()
        # Each row sees its own first token: what attends to nothing at all differs between implementations.
        mask[..., 0] = 1
        return mask
    pads = torch.randint(0, length, shape[:-1], generator=generator).unsqueeze(-1)
    places = torch.arange(length)
    return mask * ((places < length - pads) if kind == "right" else (places >= pads)).long()


def _targets(draw: Draw, shape: tuple[int, ...], generator: torch.Generator) -> dict[str, Tensor]:
    """Return the labels that the class takes."""
    rows, length, settings = shape[0], shape[-1], draw.model

    def classes(high: int) -> Tensor:
        return torch.randint(0, high, (rows,), generator=generator)

    tokens = _labels(draw, settings["vocab_size"], shape, generator)
    found: dict[str, Tensor | None] = {}
    match draw.cls:
        case "Between":
            found["labels"] = _labels(draw, 3, shape, generator)
        case "BertForMaskedLM" | "BertLMHeadModel":
            found["labels"] = tokens
        case "BertForPreTraining" if tokens is not None:
            found = {"labels": tokens, "next_sentence_label": classes(2)}
        case "LlamaForTokenClassification" | "BertForTokenClassification":
            found["labels"] = _labels(draw, settings["num_labels"], shape, generator)
        case "LlamaForSequenceClassification" | "BertForSequenceClassification":
            found["labels"] = classes(settings["num_labels"])
        case "BertForNextSentencePrediction" | "BertForMultipleChoice":
            found["labels"] = classes(2)
        case "LlamaForQuestionAnswering" | "BertForQuestionAnswering":
            found = {"start_positions": classes(length), "end_positions": classes(length)}
        case name if name.endswith(("ForCausalLM", "ForConditionalGeneration")):
            found["labels"] = tokens
    return {name: labels for name, labels in found.items() if labels is not None}


def prompt_of(batch: dict[str, Any]) -> dict[str, Any]:
    """Return what ``generate`` takes of a batch."""
    names = ("input_ids", "attention_mask", "input_features", "encoder_hidden_states")
    return {name: batch[name] for name in names if name in batch}


def part_of(draw: Draw, batch: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the name of a module below the root that people call by itself, and its arguments; ``""`` if none."""
    names = ("input_ids", "attention_mask", "inputs_embeds", "token_type_ids", "pixel_values", "use_cache")
    arguments = {name: batch[name] for name in names if name in batch}
    if draw.family == "whisper":
        if draw.cls == "WhisperForCausalLM":
            return "", {}
        name = "encoder" if draw.cls in ("WhisperModel", "WhisperForAudioClassification") else "model.encoder"
        return name, {"input_features": batch["input_features"]}
    if draw.cls in ("LlamaModel", "BertModel", "ViTModel"):
        return "", {}
    if draw.cls == "BertForMultipleChoice":
        arguments = {n: v.flatten(0, 1) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    if draw.model.get("add_cross_attention"):
        arguments["encoder_hidden_states"] = batch["encoder_hidden_states"]
    return {"llama": "model", "bert": "bert", "vit": "vit"}[draw.family], arguments
