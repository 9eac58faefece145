"""Tiny Wav2Vec2s for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers.models.wav2vec2.modeling_wav2vec2 import Wav2Vec2GumbelVectorQuantizer
from typing_extensions import override

from shardcore_testing import Case, Supports, hidden_loss, tiny

__all__ = ["build", "cases", "inputs"]

_SAMPLES, _FRAMES, _LABELS = 31, 7, 3
#: What is given masks; the others would draw them.
_MASKED = ("Wav2Vec2Model", "Wav2Vec2ForPreTraining")
_DROPOUTS = (
    "activation_dropout",
    "attention_dropout",
    "feat_proj_dropout",
    "feat_quantizer_dropout",
    "final_dropout",
    "hidden_dropout",
)
#: The classes that torch makes of parametrized modules, by name.
_CLASSES: dict[str, type[nn.Module]] = {}


class LikeliestVectors(Wav2Vec2GumbelVectorQuantizer):  # type: ignore[misc]  # untyped in transformers
    """A quantizer that draws nothing in training: the draws of two models differ."""

    @override
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def build(name: str, *, dropout: float = 0.0, seed: int = 0, stable: bool = False, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; a ``stable`` one has its norms where the large models have them."""
    settings: dict[str, Any] = {
        "vocab_size": 23,
        "hidden_size": 48,
        "intermediate_size": 37,  # divides by no number of ranks
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_feat_extract_layers": 2,
        "conv_dim": (16, 16),
        "conv_kernel": (3, 3),
        "conv_stride": (2, 2),
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "layerdrop": 0.0,
        "mask_time_prob": 0.1 * (name in _MASKED),
        "codevector_dim": 12,
        "proj_codevector_dim": 10,
        "num_codevectors_per_group": 5,
        "classifier_proj_size": 10,
        "tdnn_dim": (12, 12),
        "tdnn_kernel": (3, 1),
        "tdnn_dilation": (1, 1),
        "xvector_output_dim": 10,
        "num_labels": _LABELS,
        "attn_implementation": "eager",
        **dict.fromkeys(_DROPOUTS, dropout),
        **({"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True} if stable else {}),
        **options,
    }
    model = tiny(getattr(transformers, name), seed=seed, **settings)
    for module in model.modules():
        if is_parametrized(module):  # torch makes a class for each; the kit compares those of two models
            module.__class__ = _CLASSES.setdefault(type(module).__name__, type(module))
    if name == "Wav2Vec2ForPreTraining":
        model.quantizer.__class__ = LikeliestVectors
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return sound (3, 31), right-padded, of which convolutions make 7 frames, with what the head learns from."""
    generator = torch.Generator().manual_seed(seed)
    sound = torch.randn(3, _SAMPLES, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([(31, 23, 27), (25, 31, 19), (21, 29, 31)][seed % 3])
    mask = (torch.arange(_SAMPLES) < lengths[:, None]).long()
    batch = {"input_values": sound * mask}
    if model.config.feat_extract_norm == "layer":  # the others were trained without a mask
        batch["attention_mask"] = mask
    match type(model).__name__.removeprefix("FSDP").removeprefix("Wav2Vec2"):
        case "Model":
            batch["mask_time_indices"] = torch.rand(3, _FRAMES, generator=generator) < 0.3
        case "ForPreTraining":
            batch["mask_time_indices"] = torch.rand(3, _FRAMES, generator=generator) < 0.5
            batch["sampled_negative_indices"] = torch.randint(0, _FRAMES, (3, _FRAMES, 4), generator=generator)
        case "ForCTC":
            batch["labels"] = torch.tensor([[1, 2], [5, -100], [3, 4]]) + (seed % 3)
            batch["labels"][1, 1] = -100
        case "ForAudioFrameClassification":
            labels = torch.randint(0, _LABELS, (3, _FRAMES), generator=generator)
            batch["labels"] = torch.nn.functional.one_hot(labels, _LABELS)
        case _:
            batch["labels"] = torch.randint(0, _LABELS, (3,), generator=generator)
    return batch


_STABLE = {"stable": True}


def _case(name: str, kind: str, usual: dict[str, Any] | None = None, *, pipeline: bool = True, **fields: Any) -> Case:
    settings: dict[str, Any] = {
        "outputs": ("logits",),
        "layers": "wav2vec2.encoder.layers",
        "sharded": ("attention.q_proj", "attention.out_proj", "intermediate_dense", "output_dense"),
        "refuses": ({"num_attention_heads": 1},),
        "supports": Supports(
            tensor_parallel=(1, 2, 3, 4),
            sequence=True,
            context=not (usual or {}).get("use_weighted_layer_sum"),
            captured=("attentions", "hidden_states"),
            pipeline=pipeline,
        ),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **usual or {}), inputs=inputs, **settings)


def cases() -> list[Case]:
    """Return a case for every class, and one with adapters in its layers."""
    projected = ("projected_states", "projected_quantized_states")
    weighted = {"use_weighted_layer_sum": True}  # a sum of the states of all layers, which no stage has
    return [
        _case(
            "ctc",
            "Wav2Vec2ForCTC",
            options={"attn_implementation": ("eager", "sdpa"), "stable": (False, True)},
        ),
        _case("stable_ctc", "Wav2Vec2ForCTC", {**_STABLE, "adapter_attn_dim": 5}, whole=("adapter_layer",)),
        _case(
            "model",
            "Wav2Vec2Model",
            {"add_adapter": True, "output_hidden_size": 20, "num_adapter_layers": 2},
            loss=hidden_loss,
            outputs=("last_hidden_state", "extract_features"),
            layers="encoder.layers",
        ),
        _case("pretraining", "Wav2Vec2ForPreTraining", _STABLE, outputs=projected, pipeline=False),
        _case("sequence_classification", "Wav2Vec2ForSequenceClassification", {**_STABLE, **weighted}, pipeline=False),
        _case("audio_frame_classification", "Wav2Vec2ForAudioFrameClassification", weighted, pipeline=False),
        _case(
            "xvector",
            "Wav2Vec2ForXVector",
            _STABLE,
            outputs=("logits", "embeddings"),
            collectives=(3, 2),  # transformers asks for the states of all layers: gathered where tokens are split
        ),
    ]
