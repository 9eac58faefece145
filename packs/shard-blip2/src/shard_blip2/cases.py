"""Tiny BLIP-2s for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

_WORDS, _IMAGE = 101, 100  # divides by no number of ranks
_QUERIES, _TEXT = 3, 7
_ENDS = {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}


def _vision(heads: int, dropout: float) -> dict[str, Any]:
    return {
        "hidden_size": 72,
        "num_attention_heads": heads,
        "intermediate_size": 37,
        "num_hidden_layers": 2,
        "image_size": 8,
        "patch_size": 4,
        "attention_dropout": dropout,
    }


def _qformer(heads: int, dropout: float) -> dict[str, Any]:
    return {
        "vocab_size": _WORDS,
        "hidden_size": 36,
        "num_attention_heads": heads,
        "intermediate_size": 43,
        "num_hidden_layers": 2,  # the first of them attends to the image
        "max_position_embeddings": 9,
        "encoder_hidden_size": 72,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "pad_token_id": 0,
    }


def _opt(heads: int, dropout: float) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "vocab_size": _WORDS,
        "hidden_size": 48,
        "word_embed_proj_dim": 48,
        "ffn_dim": 41,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "max_position_embeddings": 32,
        "dropout": dropout,
        "attention_dropout": dropout,
        **_ENDS,
    }


def _t5(heads: int, dropout: float) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "vocab_size": _WORDS,
        "d_model": 32,
        "d_kv": 4,
        "d_ff": 43,
        "num_layers": 2,
        "num_decoder_layers": 2,
        "num_heads": heads,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 16,
        "dropout_rate": dropout,
        "feed_forward_proj": "gated-gelu",
        "decoder_start_token_id": 0,
        **_ENDS,
    }


_LANGUAGES = {"opt": _opt, "t5": _t5}


def build(
    name: str,
    *,
    dropout: float = 0.0,
    seed: int = 0,
    heads: int = 12,
    language: str = "opt",
    unused: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    """Return a tiny BLIP-2 of the class ``name``, whose tower of images has twice the ``heads`` of its other parts.

    Args:
        name: the class.
        dropout: of every part.
        seed: of the parameters.
        heads: of each part but the tower.
        language: the family of its language model.
        unused: parts of names of parameters that no call reads; without a gradient they would have no state in an
            optimizer, so they are not trained.
        **options: of the configuration.
    """
    vision, qformer = _vision(2 * heads, dropout), _qformer(heads, dropout)
    match name:
        case "Blip2VisionModel":
            settings = {**vision, **options}
        case "Blip2QFormerModel":
            settings = {**qformer, "use_qformer_text_input": True, **options}
        case _:
            qformer["use_qformer_text_input"] = "Text" in name
            qformer |= {key: options.pop(key) for key in ("cross_attention_frequency",) if key in options}
            settings = {
                "vision_config": {**vision, **{key: options.pop(key) for key in ("qkv_bias",) if key in options}},
                "qformer_config": qformer,
                "text_config": _LANGUAGES[language](heads, dropout),
                "num_query_tokens": _QUERIES,
                "image_text_hidden_size": 20,
                "image_token_index": None if "Retrieval" in name else _IMAGE,
                **options,
            }
    model = tiny(getattr(transformers, name), seed=seed, **{"attn_implementation": "eager", **settings})
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if path.endswith("Attention.q.weight"):  # it scales the scores, which attention in T5 does not
                parameter.mul_(0.5)
            if any(part in path for part in unused):
                parameter.requires_grad_(False)
    return model


def _mask(length: int, seed: int) -> Tensor:
    """Return a mask (3, ``length``) of rows that are padded at the end, of which one is not."""
    lengths = torch.tensor([0, 3, 1]).roll(seed)
    return (torch.arange(length) < length - lengths[:, None]).long()


def _text(generator: torch.Generator, seed: int, *, images: bool) -> dict[str, Tensor]:
    """Return ids (3, 7) that are padded at the end, after places for what the Q-Former says of the image."""
    ids = torch.randint(3, _IMAGE, (3, _TEXT), generator=generator)
    mask = _mask(_TEXT, seed)
    ids = ids * mask
    if images:
        ids = torch.cat([torch.full((3, _QUERIES), _IMAGE), ids], 1)
        mask = torch.cat([torch.ones(3, _QUERIES, dtype=torch.long), mask], 1)
    return {"input_ids": ids, "attention_mask": mask}


def _asked(config: Any, generator: torch.Generator, seed: int) -> dict[str, Any]:
    """Return queries and text (3, 10, H) with states (3, 5, T) to attend to, or queries (3, 3, H) and masked states.

    Transformers makes no mask of the states where there is text.
    """
    text, masked = (_TEXT, {}) if config.use_qformer_text_input else (0, {"encoder_attention_mask": _mask(5, seed)})
    sizes = ((3, _QUERIES + text, config.hidden_size), (3, 5, config.encoder_hidden_size))
    queries, states = (torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes)
    if text:
        masked["attention_mask"] = torch.cat([torch.ones(3, _QUERIES, dtype=torch.long), _mask(text, seed)], 1)
    return {"query_embeds": queries, "query_length": _QUERIES, "encoder_hidden_states": states, **masked}


def inputs(model: Any, seed: int, *, size: int = 8, matching: bool = False) -> dict[str, Any]:
    """Return what the model's class takes: images (3, 3, ``size``, ``size``), ids, labels; states for the Q-Former."""
    generator = torch.Generator().manual_seed(seed)
    name = type(model).__name__.removeprefix("FSDP")
    if name == "Blip2QFormerModel":
        return _asked(model.config, generator, seed)
    speaks = name in ("Blip2Model", "Blip2ForConditionalGeneration")
    batch: dict[str, Any] = {} if "Vision" in name else _text(generator, seed, images=speaks)
    if name != "Blip2TextModelWithProjection":
        batch["pixel_values"] = torch.randn(3, 3, size, size, generator=generator, dtype=torch.float64)
    if size != 8:
        batch["interpolate_pos_encoding"] = True
    if name == "Blip2ForImageTextRetrieval" and matching:
        batch["use_image_text_matching_head"] = True
    if speaks:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        batch["labels"] = ids.masked_fill((mask == 0) | (ids == _IMAGE), -100)
        if model.config.is_encoder_decoder:
            batch["labels"] = torch.randint(3, _IMAGE, (3, 5), generator=generator)
    return batch


def projected_loss(out: Any) -> Tensor:
    """Return a loss of what has been projected: a weighted mean of embeddings, or of the scores made of them."""
    names = ("image_embeds", "text_embeds", "logits_per_image")
    return weighted_mean(*(out[name] for name in names if out.get(name) is not None))


def scores_loss(out: Any) -> Tensor:
    """Return a loss of scores alone: of matches, whose embeddings are the states of the image."""
    return weighted_mean(out.logits_per_image)


#: Before some release of transformers 5 the Q-Former has no other.
_ATTENTION = ("eager", "sdpa") if transformers.Blip2QFormerModel._supports_sdpa else ("eager",)
_SIZES = (1, 2, 3, 4)
_IN_TOWER = ("self_attn.qkv", "self_attn.projection", "mlp.fc1")
_IN_QFORMER = ("attention.query", "output.dense", "intermediate_query.dense", "output_query.dense")


def _case(name: str, kind: str, *, usual: dict[str, Any] | None = None, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "inputs": inputs,
        "sharded": (*_IN_TOWER, *_IN_QFORMER),
        "options": {"attn_implementation": _ATTENTION},
        "refuses": ({"heads": 1},),
        "collectives": (2, 3),  # the third is that of a bias of queries, keys and values together
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **(usual or {})), **settings)


def _speaking(language: str, **supports: Any) -> dict[str, Any]:
    """Return what the models with a language model have in common: three lists of blocks, or four."""
    return {
        "usual": {"language": language},
        "outputs": ("logits",),
        "layers": "vision_model.encoder.layers",
        "supports": Supports(tensor_parallel=_SIZES, sequence=True, pipeline=False, **supports),
    }


def cases() -> list[Case]:
    """Return a case for every class, and those with a language model for OPT and for T5."""
    # The Q-Former runs twice, which no stage of a pipeline does.
    both = Supports(tensor_parallel=_SIZES, sequence=True, pipeline=False)
    whole: dict[str, Any] = {"loss": hidden_loss, "outputs": ("last_hidden_state", "pooler_output")}
    captured = ("attentions", "hidden_states")
    generation = "Blip2ForConditionalGeneration"
    return [
        _case("conditional_generation", generation, **_speaking("opt", generation=True, captured=("attentions",))),
        _case("conditional_generation_t5", generation, **_speaking("t5", generation=True, captured=("attentions",))),
        _case("model", "Blip2Model", **_speaking("opt", captured=("attentions",))),
        _case("model_t5", "Blip2Model", **_speaking("t5", captured=("attentions",))),
        _case(
            "contrasting",
            "Blip2ForImageTextRetrieval",
            usual={"unused": ("itm_head",)},
            loss=projected_loss,
            outputs=("logits_per_image", "text_embeds", "image_embeds"),
            supports=both,
        ),
        _case(
            "matching",
            "Blip2ForImageTextRetrieval",
            usual={"unused": ("vision_projection", "text_projection")},
            inputs=partial(inputs, matching=True),
            loss=scores_loss,
            outputs=("logits_per_image",),
            supports=Supports(tensor_parallel=_SIZES, sequence=True),
        ),
        _case(
            "text",
            "Blip2TextModelWithProjection",
            usual={"unused": ("query_tokens", "crossattention", "_query.")},
            loss=projected_loss,
            outputs=("text_embeds", "last_hidden_state"),
            sharded=("attention.query", "word_embeddings"),
            collectives=(2, 2),
            supports=Supports(tensor_parallel=_SIZES, captured=captured, checkpointing=False),
        ),
        _case(
            "vision_projection",
            "Blip2VisionModelWithProjection",
            loss=projected_loss,
            outputs=("image_embeds", "last_hidden_state"),
            supports=Supports(tensor_parallel=_SIZES, sequence=True, captured=captured),
        ),
        _case(
            "qformer",
            "Blip2QFormerModel",
            sharded=_IN_QFORMER,
            collectives=(3, 3),
            options={
                "attn_implementation": _ATTENTION,
                "cross_attention_frequency": (2, 1),
                "use_qformer_text_input": (True, False),
            },
            supports=Supports(tensor_parallel=_SIZES, captured=(*captured, "cross_attentions")),
            **whole,
        ),
        _case(
            "larger_images",
            "Blip2VisionModel",
            inputs=partial(inputs, size=12),
            sharded=_IN_TOWER,
            refuses=({"num_attention_heads": 1},),
            options={"attn_implementation": ("eager", "sdpa"), "qkv_bias": (True, False)},
            supports=Supports(tensor_parallel=_SIZES, sequence=True, captured=captured),
            **whole,
        ),
    ]
