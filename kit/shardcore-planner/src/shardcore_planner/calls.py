"""How models of transformers and timm are called in training: inputs of any size, and a loss."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardcore.errors import ConfigError
from shardcore_planner.workload import Call, Workload

#: Tokens of a sample, where neither the caller nor the model says less.
_TOKENS = 4096

_FRAMES_OF_A_POSITION = 2  # of Whisper's encoder: its second convolution has a stride of two
_COLOURS = 3  # where a configuration does not say it
_CHOICES = 4  # of a multiple-choice question
_LABELS_OF_TOKENS = (
    "CausalLM",
    "MaskedLM",
    "LMHeadModel",
    "PreTraining",
    "ConditionalGeneration",
    "MTModel",
    "TokenClassification",
)
_LABELS_OF_SAMPLES = (
    "SequenceClassification",
    "ImageClassification",
    "AudioClassification",
    "MultipleChoice",
    "NextSentencePrediction",
)


def call_of(model: nn.Module, workload: Workload) -> Call:
    """Return how ``model`` is called for a ``workload``: with full sequences, and labels if its class takes any.

    A class without labels is given a loss: the sum of the first tensor that it returns, of timm a cross entropy.

    Raises:
        ConfigError: it is of neither library, takes something else, or has fewer positions than tokens are asked for.
    """
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    if config is None or main is None:
        return _timm(model, workload)
    known = {"input_ids": "", "pixel_values": "image_size", "input_features": "max_source_positions"}
    if main not in known or not hasattr(config, known[main] or "model_type"):
        raise ConfigError(
            f"{type(model).__name__} takes {main!r}, and it is not known how to make that; plan another class of its "
            "family, or give shardcore_planner.estimate a call of your own"
        )
    seq = None if main == "pixel_values" or not _takes_tokens(model, main) else _tokens(model, config, workload)
    return Call(
        inputs=lambda: dict(_inputs(model, config, main, workload, seq or 1)),
        loss=_loss,
        seq=seq,
    )


def _timm(model: nn.Module, workload: Workload) -> Call:
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size") if hasattr(model, "num_classes") else None
    patches = getattr(model, "patch_embed", None)
    if size is None or patches is None:
        raise ConfigError(
            f"it is not known how to call a {type(model).__name__}; what is known are models of transformers and timm. "
            "Give shardcore_planner.estimate a call of your own"
        )
    size = (size[0], *getattr(patches, "img_size", size[1:]))
    return Call(
        inputs=lambda: {"": torch.ones(workload.batch, *size, dtype=workload.torch_dtype)},
        loss=lambda out: functional.cross_entropy(out, torch.zeros(out.size(0), dtype=torch.long)),
    )


def _takes_tokens(model: nn.Module, main: str) -> bool:
    return main == "input_ids" or _decodes(model)


def _decodes(model: nn.Module) -> bool:
    return "decoder_input_ids" in inspect.signature(model.forward).parameters


def _tokens(model: nn.Module, config: Any, workload: Workload) -> int:
    names = ("max_target_positions", "max_position_embeddings")
    limit: int = next((found for name in names if (found := getattr(config, name, None))), _TOKENS)
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding) and "position" in name]
    if workload.seq is not None and tables and workload.seq > limit:
        raise ConfigError(
            f"{type(model).__name__} has a table of {limit} positions ({tables[0]}), and samples of {workload.seq} "
            f"tokens were asked for; give --seq {limit} or less"
        )
    return workload.seq or min(limit, _TOKENS)


def _inputs(model: nn.Module, config: Any, main: str, workload: Workload, seq: int) -> Iterator[tuple[str, Any]]:
    rows, name, dtype = workload.batch, type(model).__name__, workload.torch_dtype
    ids = torch.ones(rows, seq, dtype=torch.long)
    if main == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        yield main, torch.ones(rows, getattr(config, "num_channels", _COLOURS), height, width, dtype=dtype)
        if name.endswith("MaskedImageModeling"):
            patch = config.patch_size if isinstance(config.patch_size, int) else config.patch_size[0]
            yield "bool_masked_pos", torch.ones(rows, (height // patch) * (width // patch), dtype=torch.bool)
    elif main == "input_features":
        frames = config.max_source_positions * _FRAMES_OF_A_POSITION
        if name.endswith("ForCausalLM"):
            yield "input_ids", ids
            yield "encoder_outputs", (torch.ones(rows, config.max_source_positions, config.d_model, dtype=dtype),)
        else:
            yield main, torch.ones(rows, config.num_mel_bins, frames, dtype=dtype)
    else:
        yield main, ids[:, None].expand(rows, _CHOICES, seq) if name.endswith("MultipleChoice") else ids
    if _decodes(model):  # not all models make them of labels, and without labels few do
        yield "decoder_input_ids", ids
    if workload.trains:
        yield from labels_of(name, rows, ids).items()


def labels_of(name: str, rows: int, ids: Tensor) -> Mapping[str, Tensor]:
    """Return what the head of a class learns from, by its name: ``ids`` (rows, tokens), or a one for each row."""
    one = torch.ones(rows, dtype=torch.long)
    if name.endswith("QuestionAnswering"):
        return {"start_positions": one, "end_positions": one}
    if name.endswith("PreTraining"):
        return {"labels": ids, "next_sentence_label": one}
    if name.endswith(_LABELS_OF_TOKENS):
        return {"labels": ids}
    return {"labels": one} if name.endswith(_LABELS_OF_SAMPLES) else {}


def _loss(out: Any) -> Tensor:
    loss = getattr(out, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    values = out.values() if isinstance(out, Mapping) else out
    first = next((value for value in values if isinstance(value, Tensor)), None)
    if first is None:
        raise ConfigError(
            f"a {type(out).__name__} has no loss and no tensor to make one of; plan another class of the family, or "
            "give shardcore_planner.estimate a call of your own"
        )
    return first.sum()
