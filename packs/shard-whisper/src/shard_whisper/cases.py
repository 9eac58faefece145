"""Tiny Whispers for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version

from shardcore_testing import Case, Supports, hidden_loss

_OLD = Version(transformers.__version__) < Version("5")
_MELS, _FRAMES = 8, 22


def build(name: str, *, dropout: float = 0.0, **options: Any) -> Any:
    """Return a Whisper whose every parameter, biases too, is drawn at random."""
    settings: dict[str, Any] = {
        "vocab_size": 101,
        "num_mel_bins": _MELS,
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 8,  # another number than the encoder's
        "encoder_ffn_dim": 83,  # divides by no number of ranks
        "decoder_ffn_dim": 90,
        "max_source_positions": _FRAMES // 2,
        "max_target_positions": 24,
        "dropout": dropout,
        "attention_dropout": dropout,
        "activation_dropout": dropout,
        "classifier_proj_size": 10,
        "num_labels": 3,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "decoder_start_token_id": 1,
        "eos_token_id": 2,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "attn_implementation": "sdpa",
        **options,
    }
    model = getattr(transformers, name)(transformers.WhisperConfig(**settings))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return model


def inputs(model: Any, seed: int) -> dict[str, Any]:
    """Return what the model's class takes: features (3, mels, frames), ids (3, 7), labels."""
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    features = torch.randn(3, _MELS, _FRAMES, generator=generator, dtype=torch.float64).to(dtype)
    ids = torch.randint(3, model.config.vocab_size, (3, 7), generator=generator)
    padded = ids.clone()
    for row, pads in enumerate(((0, 3, 1), (2, 0, 5), (4, 4, 0))[seed % 3]):
        padded[row, 7 - pads :] = -100
    match type(model).__name__:
        case "WhisperForConditionalGeneration":
            return {"input_features": features, "labels": padded}
        case "WhisperForAudioClassification":
            return {"input_features": features, "labels": ids[:, 0] % model.config.num_labels}
        case "WhisperForCausalLM":
            states = torch.randn(3, 5, model.config.d_model, generator=generator, dtype=torch.float64).to(dtype)
            # transformers 4 fails in the unsharded model where a cache is kept beside given states.
            cache = {"use_cache": False} if _OLD else {}
            return {"input_ids": ids, "labels": padded, "encoder_outputs": (states,), **cache}
    return {"input_features": features, "decoder_input_ids": ids}


_HEADS = ("encoder_attention_heads", "decoder_attention_heads")
_ATTENTION = {"attn_implementation": ("sdpa", "eager")}
_LAYER = ("self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2")
_STACKS = ("decoder_attentions", "cross_attentions", "decoder_hidden_states", "encoder_attentions")
_REFUSED = ({"d_model": 56, **dict.fromkeys(_HEADS, 7)},)


def _case(name: str, kind: str, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "build": partial(build, kind, **fields.pop("usual", {})),
        "inputs": inputs,
        "outputs": ("logits",),
        "options": _ATTENTION,
        "sharded": _LAYER,
        "refuses": _REFUSED,
        **fields,
    }
    return Case(name=name, **settings)


def cases() -> list[Case]:
    """Return a case for every class, and one with the six heads of the smallest pretrained model."""
    six: dict[str, Any] = {"usual": {"d_model": 48, **dict.fromkeys(_HEADS, 6)}}
    # transformers 4 gives the encoder's states to the layers by keyword. A reentrant checkpoint does not see them, and
    # the second layer goes backwards through the encoder again, which raises in the unsharded model too.
    speech = Supports(sequence=True, context=True, captured=_STACKS, generation=True, reentrant=not _OLD)
    text = Supports(
        sequence=True, context=True, captured=("attentions", "cross_attentions", "hidden_states"), generation=True
    )
    sound = Supports(sequence=True, context=True, captured=("attentions", "hidden_states"))
    decoder: dict[str, Any] = {"layers": "model.decoder.layers", "collectives": (3, 3)}
    bare: dict[str, Any] = {
        "loss": hidden_loss,
        "outputs": ("encoder_last_hidden_state",),
        "supports": Supports(sequence=True, context=True, captured=_STACKS, reentrant=not _OLD),
    }
    # Its weights of the layers fit one number of layers: as a case of its own it could not lose one.
    weighted = {**_ATTENTION, "use_weighted_layer_sum": (False, True)}
    return [
        _case("speech_to_text", "WhisperForConditionalGeneration", supports=speech, **decoder),
        _case(
            "six_heads",
            "WhisperForConditionalGeneration",
            supports=replace(speech, tensor_parallel=(1, 2, 3)),
            **six,
            **decoder,
        ),
        _case("model", "WhisperModel", **bare, **{**decoder, "layers": "decoder.layers"}),
        _case("causal_lm", "WhisperForCausalLM", supports=text, **decoder),
        _case(
            "audio_classification",
            "WhisperForAudioClassification",
            supports=sound,
            options=weighted,
            layers="encoder.layers",
        ),
    ]
