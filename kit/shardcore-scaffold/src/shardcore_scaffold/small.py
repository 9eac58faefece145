"""Small models of a class of transformers, and how they are called: to look at what the class computes."""

from __future__ import annotations

import copy
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shardcore.errors import ConfigError
from shardcore_scaffold.calls import FIRST_WORD, LABELS, calls, media_of
from shardcore_scaffold.follows import following, with_sections
from shardcore_scaffold.layers import Layers
from shardcore_scaffold.ways import Way, divided, outputs_of, ways
from shardcore_testing.islands import in_float64
from shardcore_testing.tiny_models import is_dropout, set_dropouts

#: Parameters of the largest model that is still small.
_LARGEST = 30_000_000

_WIDTHS = r"hidden_size|d_model|n_embd|embed_dim|embedding_size|dim|emb_dim|d_embed|word_embed_proj_dim|model_dim"
# Fields of a configuration, by name -> one of the sizes, or a number. The first that matches counts.
_SMALL: tuple[tuple[str, str | int], ...] = (
    (r"type_vocab_size|.*vocab_size_per_type", 2),
    (r"(\w+_)?vocab_size(_per_layer_input)?|n_vocab|num_embeddings", "words"),
    (r"(swa_)?num_(key_value|kv)_heads|n_head_kv|multi_query_group_num|num_global_key_value_heads", "kv heads"),
    (
        r"(num|n)_(attention_|query_|(self|cross)_attention_)?heads?|(en|de)coder_attention_heads|swa_num_attention_heads",
        "heads",
    ),
    (r"decoder_num_attention_heads|resampler_n_heads", "heads"),
    (r"((qk_nope|global|swa|resampler)_)?head_dim|d_kv|kv_channels|attention_head_size|d_head|head_size", "head"),
    (r"hidden_dim|block_ff_dim", "inner"),
    (r"v_head_dim", 6),
    (r"qk_rope_head_dim|rotary_dim", 4),
    (r"q_lora_rank", 12),
    (r"kv_lora_rank|laurel_rank", 10),
    (
        r"\w*(en|de)coder_ffn_dim|(en|de)coder_intermediate_size|dim_feedforward|ffn_dim|(en|de)coder_linear_units|ffn_hidden_size|(dense_)?intermediate_size(_mlp)?|d_?ff|dim_ff|d_inner|mlp_dim|n_inner",
        "inner",
    ),
    (
        r"(moe|shared_expert|expert|moe_shared_expert)_intermediate_size|(moe|expert)_ffn_hidden_size|moe_latent_size",
        20,
    ),
    (r"(moe_|projector_)hidden_size|projection_intermediate_size|post_conv_(mid|out)_channels|visual_feat_dim", 20),
    (r"fusion_hidden_size|head_hidden_size|number_output_channels|num_(qa|object|attr)_labels", 32),
    (r"(num|n|moe_num)_(local_|routed_|moe_)?experts", 4),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|zero_expert_num", 2),
    (r"n_group|num_expert_group|(mamba_)?n_groups", 2),
    (r"topk_group|default_num_lookahead_tokens", 1),
    (r"index_n_heads|linear_num_(value_)?heads|mamba_num_heads|mamba_n_heads|n_mamba_heads", 4),
    (r"linear_num_key_heads|num_conv_pos_embedding_groups|index_kpool", 2),
    (r"index_head_dim|linear_((key|value)_)?head_dim|mamba_(d_head|headdim|head_dim|d_state)|(ssm_)?state_size", 8),
    (r"index_topk|attention_chunk_size|(mamba_)?chunk_size|context_size|block_size", 4),
    (r"hidden_size_per_layer_input", 12),
    (_WIDTHS, "width"),
    (
        r"(encoder|decoder|text|out|audio|fpn)_hidden_size|projection_(dim|size)|text_embed_dim|conv_dim|block_dim|descriptor_decoder_dim",
        "width",
    ),
    (r"max_position_embeddings|n_positions|n_ctx|max_(source|target)_positions|max_seq_len(gth)?|seq_length", 64),
    (r"context_length|max_image_size|position_embedding_size", 64),
    (r"sliding_window|attention_window|local_attention|window_size", 4),
    (r"(mm_tokens_per_image|image_seq_length|num_image_tokens|latent_query_num|num_windows)", 4),
    (r"horizon_length|output_quantile_len", 32),
    (r"sliding_window_size|rel_extent", 13),
    (r"image_size|img_size", 16),
    (r"patch_size", 4),
    (r"d_latents", "width"),
    (r"num_latents|resampler_n_latents|chroma_length|canvas_length", 8),
    (r"num_mel_bins|n_mel_bins|model_in_dim", 16),
    (r"num_conv_pos_embeddings", 4),
    (r"base_channels|upsample_initial_channel|\w+_(predictor_channels|postnet_units)", 32),
)
# Sizes that may be lists, one for each stage.
_STAGES: tuple[tuple[str, tuple[int, ...]], ...] = (
    (r"(\w+_)?hidden_sizes|embed_dims|encoder_hidden_sizes|dims", (16, 32, 48, 64, 80, 96)),
    (r"depths", (2, 1, 2, 1, 1, 1)),
    (r"num_(attention_)?heads", (2, 2, 4, 4, 4, 4)),
)
_TOKENS_OF = {"pad": 0, "bos": 1, "eos": 2, "decoder_start": 2, "cls": 1, "sep": 2, "forced_eos": 2, "forced_bos": 1}
_NOT_TAKEN = {"transformers_version", "architectures", "dtype", "id2label", "label2id", "quantization_config", "name"}


@dataclass(frozen=True)
class Small:
    """A small model of a class, and how it is called.

    Attributes:
        model: in float64 on the CPU, every parameter random, without dropout, in eval mode.
        inputs: the keyword arguments of one call, random and the same in every process.
        settings: the fields of its configuration that differ from the default of its class.
        left_out: what it takes besides text, by the names of arguments, where no call with them is known; with the
            reason.
    """

    model: nn.Module
    inputs: Mapping[str, Any]
    settings: Mapping[str, Any]
    left_out: str = ""


def config_of(model_class: Any, text: str) -> Any:
    """Return the configuration that ``to_json_string`` wrote: infinities are numbers again."""
    config_class = model_class.config_class
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(text)
        found, _ = config_class.get_config_dict(folder)
    return config_class.from_dict(found)


@in_float64()
def small_model(
    model_class: type[Any],
    config: Any = None,
    seed: int = 0,
    *,
    generating: bool = False,
    sizes: Mapping[str, int] | None = None,
) -> Small:
    """Return a small model of a class of transformers: with a layer of each kind, and every switch as it is.

    Args:
        model_class: the class.
        config: a configuration whose switches count; of its sizes only which are equal. The class's own by default.
        seed: of the parameters.
        generating: make a decoder of a class that can generate, where its configuration calls it an encoder.
        sizes: other sizes than the usual ones: of ``words``, ``heads``, ``kv heads``, ``width``, ``inner``, ``head``.

    Raises:
        ConfigError: the class has no configuration, none that could be made small, or takes what is not known here.
    """
    config_class = getattr(model_class, "config_class", None)
    if config_class is None:
        raise ConfigError(f"{model_class.__name__} has no class of configurations, so that no small model can be built")
    config = config_class() if config is None else config
    try:
        whole = _kinds(_on_meta(model_class, config))
    except Exception:  # sizes may be missing, which a small copy is given
        whole = set()
    reasons, found = dict[str, None](), []
    for way in ways(sizes or {}, config):
        try:
            small = _with_all_kinds(model_class, config, way, whole, generating)
            if small not in found:  # another way may come to the same
                found.append(small)
                return _small_called(model_class, small, seed)
        except Exception as error:
            reasons[_said(error)] = None
    for settings in found:  # which could not be called with images or sounds
        try:
            return _small_called(model_class, settings, seed, next(iter(reasons))[:200])
        except Exception as error:
            reasons[_said(error)] = None
    raise ConfigError(f"no small {model_class.__name__} could be built and called: {next(iter(reasons))[:300]}")


def _small_called(model_class: type[Any], settings: dict[str, Any], seed: int, failed: str = "") -> Small:
    """Return the small model of settings; where a call with images or sounds ``failed``, it is called with text."""
    model = _built(model_class, model_class.config_class(**copy.deepcopy(settings)), seed)
    if failed and not media_of(model):
        raise ConfigError("all of this was tried")
    inputs = _called(model, seed, media=not failed)
    left_out = f"{', '.join(media_of(model))} ({failed})" if failed else ""
    return Small(model, inputs, _differing(settings, model_class.config_class()), left_out)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _called(model: nn.Module, seed: int, *, media: bool = True) -> Mapping[str, Any]:
    """Return the arguments of the first call that the model takes, and answers with numbers if it does so to any."""
    first: Exception | None = None
    taken: Mapping[str, Any] = {}
    for inputs in calls(model, seed, media=media):
        try:
            with torch.random.fork_rng(devices=()):
                out = copy.deepcopy(model)(**inputs)  # what it keeps of a call, the model does not have
        except Exception as error:
            first = first or error
        else:
            if not any(leaf.isnan().any() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
                return inputs
            taken = taken or inputs
    if taken:
        return taken
    raise first or ConfigError(f"{type(model).__name__} takes no text")


def _on_meta(model_class: Any, config: Any) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = model_class(copy.deepcopy(config))
    return model


def _kinds(model: nn.Module) -> set[str]:
    """Return the kinds of modules and parameters of a model: names and classes, without numbers.

    What drops something in training, or passes it on, is none: a small copy drops nothing.
    """
    named = [(name, type(module).__name__) for name, module in model.named_modules()]
    named = [(name, kind) for name, kind in named if "Drop" not in kind and kind != "Identity"]
    named += [(name, "") for name, _ in model.named_parameters()]
    return {f"{re.sub(r'[0-9]+', 'N', name)} {kind}" for name, kind in named}


def _ends_alone(model: nn.Module) -> bool:
    """Tell whether the last block of a list has something that none before it has."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    return any(not _kinds(blocks[-1]) <= set().union(*map(_kinds, blocks[:-1])) for blocks in lists)


def _with_all_kinds(model_class: Any, config: Any, way: Way, whole: set[str], generating: bool) -> dict[str, Any]:
    """Return the settings with the fewest layers that have all kinds of modules that the whole model has.

    Where the model is to be a case, which is compared with one that has a block less, that one has all kinds too.
    """
    least, last = None, dict[str, Any]()
    for count in (2, 3, 4, 5, 6, 8):
        try:
            settings = _settings(config, way, count, {})
            settings |= _widths(config, settings, way.sizes["width"]) if way.apart else {}
            settings |= _of_head(model_class, settings, config, generating)
            if settings == last:
                continue
            last = settings
            model = _on_meta(model_class, type(config)(**copy.deepcopy(settings)))
            if turned := with_sections(model, settings):
                model = _on_meta(model_class, type(config)(**copy.deepcopy(turned)))
                settings = turned
        except Exception as error:
            failed = error
            continue
        size = sum(p.numel() for p in model.parameters())
        missing = len(whole - _kinds(model)) + (generating and _ends_alone(model))
        if size > _LARGEST:
            failed = ConfigError(f"it has {size:,} parameters with the sizes that are known here, which is not small")
        elif least is None or missing < least:
            least, found = missing, settings
        if not missing:
            break
    if least is None:
        raise failed
    return found


def _built(model_class: Any, config: Any, seed: int) -> nn.Module:
    set_dropouts(config, 0.0)
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
        own = vars(default).get(name)
        if isinstance(value, Mapping) and hasattr(own, "to_dict"):
            found[name] = _differing(value, type(own)())  # of which a mapping is a configuration, not of ``own``
        elif own != value or type(own) is not type(value):
            found[name] = value
    return found


def _settings(config: Any, way: Way, count: int, tokens: dict[str, int]) -> dict[str, Any]:
    """Return the fields of ``config`` that make a small one, with its switches and without its dropouts.

    Args:
        config: the configuration.
        way: how it is made small.
        count: at least so many layers.
        tokens: the special tokens that have a number, by name.
    """
    found: dict[str, Any] = {}
    layers = Layers(vars(config), count, all_places=bool(way.divided))
    for name, value in vars(config).items():
        if name.startswith("_") or name in _NOT_TAKEN or isinstance(value, set | frozenset) or is_dropout(name, value):
            continue
        if (way.divided and name == "image_embedding_size") or name.startswith("dim_bbox_"):
            continue  # it follows from the side of an image, or from the width
        token = re.fullmatch(r"(\w+)_token_(id|index|idx)", name)
        if hasattr(value, "to_dict") and hasattr(value, "model_type"):
            found[name] = {**_settings(value, way, count, tokens), "model_type": value.model_type}
        elif isinstance(value, float) and re.search(r"jitter|noise|layer_?drop|^mask_\w+_prob$", name):
            found[name] = 0.0  # what is compared draws nothing
        elif name == "pos_embed_rescale":
            found[name] = None  # drawn anew for each call
        elif re.fullmatch(r"(width|depth)_coefficient", name):
            found[name] = 1.0
        elif token and (isinstance(value, int | list) or (way.unset and name == "pad_token_id")):
            stem = token[1]
            found[name] = _TOKENS_OF[stem] if stem in _TOKENS_OF else tokens.setdefault(stem, 3 + len(tokens))
        elif name in layers.found:
            found[name] = layers.found[name]
        elif name in way.kept or isinstance(value, bool | str):
            found[name] = value
        elif way.divided:
            found[name] = divided(name, value, way)
        else:
            found[name] = _small(name, value, way, vars(config))
            if isinstance(found[name], list) and len(value) == layers.of:
                found[name] = found[name][: layers.count]
    found |= following(found, vars(config)) | (outputs_of(config) if way.divided else {})
    if max(tokens.values(), default=0) >= FIRST_WORD:
        raise ConfigError(f"it has {len(tokens)} special tokens, which are more than a small vocabulary holds")
    if getattr(config, "is_encoder_decoder", False):
        found.setdefault("decoder_start_token_id", _TOKENS_OF["decoder_start"])
    if "num_labels" in dir(config):
        found["num_labels"] = LABELS
    return found


def _small(name: str, value: Any, way: Way, fields: Mapping[str, Any]) -> Any:
    """Return a size as a small one, each of a list too; anything else as it is."""
    if isinstance(value, list | tuple):
        stages = next((small for pattern, small in _STAGES if re.fullmatch(pattern, name)), None)
        if stages and all(type(each) is int for each in value):
            return list(stages[: len(value)])
        if name == "downsample_channels":  # until the width of what comes next
            return [*[20] * (len(value) - 1), way.sizes["width"]]
        return [_small(name, each, way, fields) for each in value]
    named = next((small for pattern, small in _SMALL if re.fullmatch(pattern, name)), None)
    size = way.sizes[named] if isinstance(named, str) else named
    if name in ("image_size", "img_size"):
        size = way.sizes.get("image", size)
    if name == "window_size" and "patch_size" in fields:
        size = 16  # of pixels: two patches, and what is merged of them
    if size is not None and type(value) is int and value:
        return min(size, value)
    return size if value is None and way.unset else copy.deepcopy(value)


def _widths(config: Any, settings: Mapping[str, Any], small: int) -> dict[str, int]:
    """Return widths of ``settings`` that are not the width of the blocks in ``config``, so that they are not here."""
    main = next((name for name in ("hidden_size", "d_model", "n_embd") if type(vars(config).get(name)) is int), "")
    width, narrower = vars(config).get(main or "hidden_size"), iter((small // 2, small // 4))
    others: dict[int, int] = {}  # by the size that they have in the configuration
    found = {}
    for name, size in settings.items():
        own = vars(config).get(name)
        if size == small and re.fullmatch(_WIDTHS, name) and own != width and type(own) is int:
            if own not in others:
                others[own] = next(narrower, small)
            found[name] = others[own]
    return found if type(width) is int and width else {}


def _of_head(model_class: type[Any], settings: Mapping[str, Any], config: Any, generating: bool) -> dict[str, Any]:
    """Return what the head of a class, told by its name, needs its configuration to be."""
    name, found = model_class.__name__, dict[str, Any]()
    if name.endswith(("QuestionAnswering", "QuestionAnsweringSimple")) and "num_labels" in settings:
        found["num_labels"] = 2  # start and end
    if name.endswith("ImageMatting"):
        found["num_labels"] = 4  # colours, and how much of each pixel there is
    if name.endswith("SequenceClassification") and getattr(config, "pad_token_id", 0) is None:
        found["pad_token_id"] = _TOKENS_OF["pad"]  # the last token of a row is looked for
    encodes = getattr(config, "is_decoder", None) is False and not getattr(config, "is_encoder_decoder", False)
    if generating and encodes and getattr(model_class, "can_generate", bool)():
        found["is_decoder"] = True
    return found
