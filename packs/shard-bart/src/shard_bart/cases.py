"""Tiny BARTs for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version

from shardcore_testing import Case, Supports, encoder_decoder_batch, hidden_loss, randomized

_OLD = Version(transformers.__version__) < Version("5")
_HAS_MVP = Version(transformers.__version__) >= Version("5.2.0rc0")


def build(name: str, *, dropout: float = 0.0, seed: int = 0, **options: Any) -> Any:
    """Return a tiny model of the class ``name``, with a bias on its logits; ``options`` change its configuration.

    Positions of sines stay as they are: Marian and M2M-100 do not save them.
    """
    settings: dict[str, Any] = {
        "vocab_size": 101,  # divides by no number of ranks
        "d_model": 48,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 8,  # another number than the encoder's
        "encoder_ffn_dim": 43,
        "decoder_ffn_dim": 45,
        "max_position_embeddings": 24,
        "num_labels": 2 if name.endswith("QuestionAnswering") else 3,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "classifier_dropout": dropout,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "forced_eos_token_id": None,
        "decoder_start_token_id": 2,
        "attn_implementation": "sdpa",
        **options,
    }
    native = getattr(transformers, name)
    model: Any = native(native.config_class(**settings))
    sines = {path: p.detach().clone() for path, p in model.named_parameters() if not p.requires_grad}
    randomized(model, seed).load_state_dict(sines, strict=False)
    if (bias := getattr(model, "final_logits_bias", None)) is not None:
        bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(seed)))
    return model


_HEADS = ("encoder_attention_heads", "decoder_attention_heads")
_TWELVE = dict.fromkeys(_HEADS, 12)
_BOTH = ("decoder_attentions", "cross_attentions", "decoder_hidden_states", "encoder_attentions")
_DECODER = ("attentions", "cross_attentions", "hidden_states")


def _case(name: str, kind: str, **fields: Any) -> Case:
    prompted = kind.startswith("Mvp") and not kind.endswith("CausalLM")  # that leaves prompts out
    written_out = fields.get("usual", {}).get("attn_implementation")  # where transformers has no other
    settings: dict[str, Any] = {
        "inputs": encoder_decoder_batch,
        "outputs": ("logits",),
        "options": {"attn_implementation": (written_out,) if written_out else ("sdpa", "eager")},
        "layers": "model.decoder.layers",
        "collectives": (3, 3),
        "sharded": ("q_proj", "out_proj", "fc1", "fc2", "embed_tokens"),
        "refuses": (dict.fromkeys(_HEADS, 1), *([{"use_prompt": True}] if prompted else [])),
        "supports": Supports(sequence=True, context=True, captured=_BOTH),
        **fields,
    }
    if kind.startswith("Mvp"):  # it computes attention by itself
        settings["supports"] = replace(settings["supports"], context=False)
    return Case(name=name, build=partial(build, kind, **settings.pop("usual", {})), **settings)


def _family(
    family: str, prefix: str, *, words: str = "ForConditionalGeneration", alone: bool = True, **usual: Any
) -> list[Case]:
    """Return a case for every class that a family has; the one that translates has heads for three ranks too.

    ``alone``: there is a class of the decoder alone.
    """
    cases = [
        _case(
            f"{prefix}{'translation' if words == 'MTModel' else 'conditional_generation'}",
            f"{family}{words}",
            supports=Supports(
                sequence=True, context=True, captured=_BOTH, generation=True, tensor_parallel=(1, 2, 3, 4)
            ),
            usual={**usual, **_TWELVE},
        ),
        _case(
            f"{prefix}model",
            f"{family}Model",
            layers="decoder.layers",
            outputs=("last_hidden_state", "encoder_last_hidden_state"),
            loss=hidden_loss,
            usual=usual,
        ),
        _case(
            f"{prefix}causal_lm",
            f"{family}ForCausalLM",
            supports=Supports(sequence=True, context=True, captured=_DECODER, generation=True),
            usual=usual,
        ),
    ]
    return cases if alone else cases[:-1]


def _classifiers(family: str, prefix: str, **usual: Any) -> list[Case]:
    scores = ("start_logits", "end_logits")
    return [
        _case(f"{prefix}sequence_classification", f"{family}ForSequenceClassification", usual=usual),
        _case(f"{prefix}question_answering", f"{family}ForQuestionAnswering", outputs=scores, usual=usual),
    ]


def cases() -> list[Case]:
    """Return a case for every class, and a Marian of two vocabularies."""
    scaled: dict[str, Any] = {"scale_embedding": True}
    eager: dict[str, Any] = {"attn_implementation": "eager"}
    apart = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 89, "tie_word_embeddings": False}
    return [
        *_family("Bart", ""),
        *_classifiers("Bart", ""),
        *_family("MBart", "mbart_", **scaled),
        *_classifiers("MBart", "mbart_", **scaled),
        *_family("Marian", "marian_", words="MTModel", **scaled),
        _case(
            "marian_two_vocabularies",
            "MarianMTModel",
            supports=Supports(sequence=True, context=True, captured=_BOTH, generation=True),
            usual={**scaled, **apart},
        ),
        *_family("Pegasus", "pegasus_", **scaled),
        *_family("Blenderbot", "blenderbot_", **scaled),
        *_family("BlenderbotSmall", "blenderbot_small_"),
        *_family("M2M100", "m2m100_", alone=False, **scaled),
        *([*_family("Mvp", "mvp_", **eager), *_classifiers("Mvp", "mvp_", **eager)] if _HAS_MVP else []),
        *_family("PLBart", "plbart_", **scaled),
        _case("plbart_sequence_classification", "PLBartForSequenceClassification", usual=scaled),
    ]
