"""Small models of a class of transformers or timm, and how they are called: to look at what the class computes."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardcore.errors import ConfigError
from shardcore_planner.calls import labels_of

__all__ = ["Small", "small_inputs", "small_model"]

_WORDS, _ROWS, _TOKENS, _LABELS, _CHOICES = 97, 2, 9, 3, 2

#: Parameters of the largest model that is still small.
_LARGEST = 20_000_000
_KV_HEADS = r"num_(key_value|kv)_heads|n_head_kv|multi_query_group_num"

_WIDTHS = r"hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|emb_dim|d_embed|word_embed_proj_dim|model_dim"
_WIDTH, _NARROWER = 32, (24, 16)

# Fields of a configuration, by name -> a small value. The first that matches counts. No two kinds of sizes are equal,
# where they can be told apart: what is read must say which of them it is.
_SMALL: tuple[tuple[str, int], ...] = (
    (r"type_vocab_size|.*vocab_size_per.*", 2),
    (r"(\w+_)?vocab_size|n_vocab|num_embeddings", _WORDS),
    (_KV_HEADS, 2),
    (r"(num|n)_(attention_|query_|self_attention_)?heads?|(en|de)coder_attention_heads", 4),
    (r"(num|n)_(hidden_|decoder_|encoder_)?layers?|(en|de)coder_layers|num_blocks|n_block|depth", 2),
    (r"head_dim|d_kv|kv_channels|attention_head_size|qk_nope_head_dim|head_size", 8),
    (r"v_head_dim", 6),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"q_lora_rank", 12),
    (r"kv_lora_rank", 10),
    (
        r"(en|de)coder_ffn_dim|ffn_dim|ffn_hidden_size|intermediate_size|d_ff|dim_ff|d_inner|mlp_dim|n_inner|hidden_dim",
        44,
    ),
    (r"(moe|shared_expert|expert)_intermediate_size|moe_ffn_hidden_size", 20),
    (r"(num|n)_(local_|routed_)?experts", 4),
    (r"num_experts_per_tok|moe_topk|moe_k", 2),
    (_WIDTHS, _WIDTH),
    (r"encoder_hidden_size|projection_(dim|size)|text_embed_dim", 32),
    (r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_seq_len(gth)?|seq_length", 64),
    (r"sliding_window|attention_window|local_attention|window_size", 4),
    (r"image_size|img_size", 16),
    (r"patch_size", 4),
    (r"num_mel_bins", 16),
    (r"num_conv_pos_embeddings", 4),
    (r"num_conv_pos_embedding_groups", 2),
)
_TOKENS_OF = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 2, "cls": 1, "sep": 2, "forced_eos": 2, "forced_bos": 1}


@dataclass(frozen=True)
class Small:
    """A small model of a class, and how it is called.

    Attributes:
        model: in float64 on the CPU, every parameter random, without dropout, in eval mode.
        inputs: the keyword arguments of one call, random and the same in every process.
        settings: the fields of its configuration that differ from the default of its class.
        dropouts: the fields that are dropouts.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    settings: Mapping[str, Any]
    dropouts: Sequence[str]


def small_model(model_class: type[Any], config: Any = None, seed: int = 0, *, generating: bool = False) -> Small:
    """Return a small model of a class of transformers.

    Args:
        model_class: the class.
        config: a configuration whose switches count; of its sizes only which are equal. The class's own by default.
        seed: of the parameters.
        generating: make a decoder of a class that can generate, where its configuration calls it an encoder.

    Raises:
        ConfigError: the class has no configuration, none that could be made small, or takes what is not known here.
    """
    config_class = getattr(model_class, "config_class", None)
    if config_class is None:
        raise ConfigError(f"{model_class.__name__} has no class of configurations, so that no small model can be built")
    reasons = []
    # With fewer key/value heads than heads if the class has them, and widths that differ where they do in ``config``;
    # sizes without a default get one where the class wants it; those that may not be small stay as they are.
    for kv, own, apart, unset in (
        (2, {}, True, False),
        (2, {}, False, False),
        (4, {}, True, False),
        (4, {}, False, False),
        (2, {}, False, True),
        (4, {"head_dim": None}, False, False),
        (4, {"hidden_size": None, "d_model": None}, False, False),
        (4, {"image_size": 64}, False, False),
        (4, {"image_size": None, "patch_size": None}, False, False),
    ):
        try:
            settings, dropouts = _settings(config or config_class(), kv, own, unset)
            settings |= _widths(config or config_class(), settings) if apart else {}
            settings |= _of_head(model_class, settings, config or config_class(), generating)
            model = _built(model_class, config_class(**settings), seed)
            inputs = small_inputs(model, seed)
            copy.deepcopy(model)(**inputs)  # what it keeps of a call, the model does not have
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {' '.join(str(error).split())}")
        else:
            return Small(model, inputs, _differing(settings, config_class()), dropouts)
    raise ConfigError(f"no small {model_class.__name__} could be built and called: {reasons[0][:300]}")


def _built(model_class: Any, config: Any, seed: int) -> nn.Module:
    with torch.device("meta"):
        size = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    if size > _LARGEST:
        raise ConfigError(f"it has {size:,} parameters with the sizes that are known here, which is not small")
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=()):
        torch.default_generator.manual_seed(seed)
        model: nn.Module = model_class(config).double().eval()
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def _differing(settings: Mapping[str, Any], default: Any) -> dict[str, Any]:
    """Return the settings that are not what ``default`` has."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        own = getattr(default, name, None)
        if isinstance(value, Mapping) and hasattr(own, "to_dict"):
            found[name] = _differing(value, own)
        elif own != value or type(own) is not type(value):
            found[name] = value
    return found


def _settings(config: Any, kv: int, own: Mapping[str, int | None], unset: bool) -> tuple[dict[str, Any], list[str]]:
    """Return the fields of ``config`` that make a small one, with its switches, and the names of its dropouts.

    Args:
        config: the configuration.
        kv: the number of key/value heads.
        own: fields with another size than the usual one; None leaves it as it is.
        unset: give sizes that are None a value, and the token that pads.
    """
    found: dict[str, Any] = {}
    dropouts = []
    for name, value in vars(config).items():
        if own.get(name, 0) is None or name.startswith("_") or name == "transformers_version":
            continue
        small = own.get(name) or next((size for pattern, size in _SMALL if re.fullmatch(pattern, name)), None)
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found[name] = {**_settings(value, kv, own, unset)[0], "model_type": value.model_type}
        elif (isinstance(value, float) and "drop" in name) or (value is None and name.endswith("_dropout")):
            found[name] = 0.0
            dropouts.append(name)
        elif (name.endswith("_token_id") and isinstance(value, int | list)) or (unset and name == "pad_token_id"):
            found[name] = _TOKENS_OF.get(name.removesuffix("_token_id"), 3)
        elif isinstance(value, bool | str):
            found[name] = value
        elif small is not None and ((isinstance(value, int) and value) or (value is None and unset)):
            size = kv if re.fullmatch(_KV_HEADS, name) else small
            found[name] = size if value is None else min(size, value)
    if getattr(config, "is_encoder_decoder", False):
        found.setdefault("decoder_start_token_id", _TOKENS_OF["decoder_start"])
    if "num_labels" in dir(config):
        found["num_labels"] = _LABELS
    return found, dropouts


def _widths(config: Any, settings: Mapping[str, Any]) -> dict[str, int]:
    """Return widths of ``settings`` that are not the width of the blocks in ``config``, so that they are not here."""
    main = next((name for name in ("hidden_size", "d_model", "n_embd") if type(getattr(config, name, None)) is int), "")
    width, narrower = getattr(config, main or "hidden_size", None), iter(_NARROWER)
    others: dict[int, int] = {}  # by the size that they have in the configuration
    found = {}
    for name, size in settings.items():
        own = getattr(config, name, None)
        if size == _WIDTH and re.fullmatch(_WIDTHS, name) and own != width and type(own) is int:
            if own not in others:
                others[own] = next(narrower, _WIDTH)
            found[name] = others[own]
    return found if type(width) is int and width else {}


def _of_head(model_class: type[Any], settings: Mapping[str, Any], config: Any, generating: bool) -> dict[str, Any]:
    """Return what the head of a class, told by its name, needs its configuration to be."""
    name, found = model_class.__name__, dict[str, Any]()
    if name.endswith("QuestionAnswering") and "num_labels" in settings:
        found["num_labels"] = 2  # start and end
    if name.endswith("SequenceClassification") and getattr(config, "pad_token_id", 0) is None:
        found["pad_token_id"] = _TOKENS_OF["pad"]  # the last token of a row is looked for
    encodes = getattr(config, "is_decoder", None) is False and not getattr(config, "is_encoder_decoder", False)
    if generating and encodes and getattr(model_class, "can_generate", bool)():
        found["is_decoder"] = True
    return found


def small_inputs(model: Any, seed: int = 0) -> dict[str, Any]:
    """Return the arguments of one call of a small model, random and the same in every process.

    Raises:
        ConfigError: it takes something that is not known.
    """
    generator = torch.Generator().manual_seed(seed)
    config, takes = model.config, inspect.signature(model.forward).parameters
    text = getattr(config, "text_config", config)
    words = getattr(text, "vocab_size", None) or getattr(config, "vocab_size", None) or _WORDS

    def ids(rows: int = _ROWS) -> Tensor:
        return torch.randint(3, words, (rows, _TOKENS), generator=generator)

    main = model.main_input_name
    found: dict[str, Any] = {}
    name = type(model).__name__
    if main == "input_ids":
        found["input_ids"] = ids()
        if name.endswith("MultipleChoice"):
            found["input_ids"] = torch.stack([ids() for _ in range(_CHOICES)], 1)
        if "attention_mask" in takes:
            found["attention_mask"] = torch.ones_like(found["input_ids"])
    vision = getattr(config, "vision_config", config)
    if "pixel_values" in takes and (main == "pixel_values" or hasattr(config, "vision_config")):
        size = getattr(vision, "image_size", 32)
        height, width = (size, size) if isinstance(size, int) else size
        channels = getattr(vision, "num_channels", 3)
        found["pixel_values"] = torch.randn(_ROWS, channels, height, width, generator=generator, dtype=torch.float64)
    if main == "input_values":
        found[main] = torch.randn(_ROWS, 1600, generator=generator, dtype=torch.float64)
    if main == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 32)
        found[main] = torch.randn(_ROWS, config.num_mel_bins, frames, generator=generator, dtype=torch.float64)
    if not found:
        raise ConfigError(f"{type(model).__name__} takes {main!r}, and it is not known how to make that")
    rows = found.get("input_ids", ids())
    if "decoder_input_ids" in takes and "labels" not in takes:
        found["decoder_input_ids"] = ids()
    found |= {key: value for key, value in labels_of(name, _ROWS, rows).items() if key in takes}
    if name.endswith("TokenClassification") and "labels" in found:
        found["labels"] = found["labels"] % config.num_labels
    if name.endswith("PreTraining") and "labels" in found and model.get_output_embeddings() is None:
        found["labels"] = found["labels"] % 2  # whether a token was replaced
    return found
