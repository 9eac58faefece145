"""Tiny encoders of speech for the conformance kit (`shardcore_testing`)."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from typing_extensions import override

from shardcore_testing import Case, Supports, hidden_loss, tiny, weighted_mean

_SAMPLES, _FRAMES, _SPECTRUM, _LABELS = 31, 7, 10, 3
#: By what the names of classes begin with: the name of the model in one with a head, and options of the configuration.
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Wav2Vec2": ("wav2vec2", {}),
    "Data2VecAudio": ("data2vec_audio", {"conv_pos_kernel_size": 5, "feat_extract_norm": "layer"}),
    "Hubert": ("hubert", {}),
    "SEW": ("sew", {"squeeze_factor": 2, "feat_extract_norm": "layer"}),
    "UniSpeech": ("unispeech", {"num_ctc_classes": 9, "replace_prob": 0.0}),
    "UniSpeechSat": ("unispeech_sat", {"num_clusters": 6}),
    "WavLM": ("wavlm", {"num_buckets": 8, "max_bucket_distance": 6}),
    "Wav2Vec2Bert": (
        "wav2vec2_bert",
        {
            "feature_projection_input_dim": _SPECTRUM,
            "conv_depthwise_kernel_size": 3,
            "left_max_position_embeddings": 3,
            "right_max_position_embeddings": 2,
        },
    ),
    "Wav2Vec2Conformer": (
        "wav2vec2_conformer",
        {"conv_depthwise_kernel_size": 3, "feat_extract_norm": "layer", "position_embeddings_type": "relative"},
    ),
}
#: Those whose blocks have convolutions, and the positions that their pretrained models have.
_POSITIONS = {"Wav2Vec2Bert": "relative_key", "Wav2Vec2Conformer": "relative"}
#: What is given masks; the others would draw them.
_MASKED = (*(f"{family}Model" for family in _FAMILIES), "Wav2Vec2ForPreTraining", "Wav2Vec2ConformerForPreTraining")
#: Attention of conformers may be computed by torch, and positions be rotary.
_NEW = Version(transformers.__version__) >= Version("5.17")
#: What upstream makes and does not read, or not without a mask: no optimizer steps it.
_UNREAD = {
    "UniSpeechForPreTraining": ("ctc_proj",),
    "UniSpeechSatForPreTraining": (
        "quantizer",
        "project_",
        "speaker_proj",
        "label_embeddings",
        "layer_norm_for_extract",
    ),
}
_DROPOUTS = (
    "activation_dropout",
    "attention_dropout",
    "conformer_conv_dropout",
    "feat_proj_dropout",
    "feat_quantizer_dropout",
    "final_dropout",
    "hidden_dropout",
)
#: The classes that torch makes of parametrized modules, by name.
_CLASSES: dict[str, type[nn.Module]] = {}


class _Likeliest(nn.Module):
    @override
    def train(self, mode: bool = True) -> Any:
        return super().train(False)


def likeliest(quantizer: type[nn.Module]) -> type[nn.Module]:
    """Return a quantizer that draws nothing in training: the draws of two models differ."""
    name = f"Likeliest{quantizer.__name__}"
    return _CLASSES.setdefault(name, type(name, (_Likeliest, quantizer), {}))


def split(name: str) -> tuple[str, str]:
    """Return the family and the head of a class."""
    name = name.removeprefix("FSDP")
    family = max((family for family in _FAMILIES if name.startswith(family)), key=len)
    return family, name.removeprefix(family)


def build(name: str, *, dropout: float = 0.0, seed: int = 0, stable: bool = False, **options: Any) -> Any:
    """Return a tiny model of the class ``name``; a ``stable`` one has its norms where the large models have them."""
    family, head = split(name)
    settings: dict[str, Any] = {
        "vocab_size": 23,
        "hidden_size": 48,
        "intermediate_size": 37,  # divides by no number of ranks
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_feat_extract_layers": 2,
        "max_source_positions": 16,
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
        **_FAMILIES[family][1],
        **({"do_stable_layer_norm": True, "feat_extract_norm": "layer", "conv_bias": True} if stable else {}),
        **options,
    }
    model = tiny(getattr(transformers, name), seed=seed, **settings)
    for module in model.modules():
        if is_parametrized(module):  # torch makes a class for each; the kit compares those of two models
            module.__class__ = _CLASSES.setdefault(type(module).__name__, type(module))
    if head == "ForPreTraining":
        model.quantizer.__class__ = likeliest(type(model.quantizer))
    unread = (*_UNREAD.get(name, ()), *(() if name in _MASKED else ("masked_spec_embed",)))
    for path, parameter in model.named_parameters():
        if any(part in path for part in unread):
            parameter.requires_grad_(False)
    return model


def inputs(model: Any, seed: int) -> dict[str, Tensor]:
    """Return sound (3, 31), right-padded, of which convolutions make 7 frames, with what the head learns from.

    Of a model that sees spectra they are 7 spectra.
    """
    generator = torch.Generator().manual_seed(seed)
    family, head = split(type(model).__name__)
    lengths = torch.tensor([(31, 23, 27), (25, 31, 19), (21, 29, 31)][seed % 3])
    if family == "Wav2Vec2Bert":
        spectra = torch.randn(3, _FRAMES, _SPECTRUM, generator=generator, dtype=torch.float64)
        batch = {"input_features": spectra, "attention_mask": (torch.arange(_FRAMES) < lengths[:, None] // 4).long()}
    else:
        sound = torch.randn(3, _SAMPLES, generator=generator, dtype=torch.float64)
        mask = (torch.arange(_SAMPLES) < lengths[:, None]).long()
        batch = {"input_values": sound * mask}
        gated = family == "WavLM"  # warns of its own masks; a test of the pack has one
        if model.config.feat_extract_norm == "layer" and not gated:  # the others were trained without a mask
            batch["attention_mask"] = mask
    match family, head:
        case (_, "Model"):
            batch["mask_time_indices"] = torch.rand(3, _FRAMES, generator=generator) < 0.3
        case ("Wav2Vec2" | "Wav2Vec2Conformer", "ForPreTraining"):
            batch["mask_time_indices"] = torch.rand(3, _FRAMES, generator=generator) < 0.5
            batch["sampled_negative_indices"] = torch.randint(0, _FRAMES, (3, _FRAMES, 4), generator=generator)
        case (_, "ForPreTraining"):
            pass
        case (_, "ForCTC"):
            batch["labels"] = torch.tensor([[1, 2], [5, -100], [3, 4]]) + (seed % 3)
            batch["labels"][1, 1] = -100
        case (_, "ForAudioFrameClassification"):
            labels = torch.randint(0, _LABELS, (3, _FRAMES), generator=generator)
            batch["labels"] = torch.nn.functional.one_hot(labels, _LABELS)
        case _:
            batch["labels"] = torch.randint(0, _LABELS, (3,), generator=generator)
    return batch


def projected_loss(out: Any) -> Tensor:
    """Return a loss where upstream has none yet: a weighted mean of what is compared."""
    found = (out.get("logits"), out.projected_states, out.projected_quantized_states)
    return weighted_mean(*(tensor for tensor in found if tensor is not None))


_STABLE = {"stable": True}
_WEIGHTED = {"use_weighted_layer_sum": True}  # a sum of the states of all layers, which no stage has


def _case(name: str, kind: str, usual: dict[str, Any] | None = None, *, pipeline: bool = True, **fields: Any) -> Case:
    family = split(kind)[0]
    gated = family == "WavLM"  # its attention is written out, for whole heads, and returns a mean over all
    settings: dict[str, Any] = {
        "outputs": ("logits",),
        "layers": f"{_FAMILIES[family][0]}.encoder.layers",
        "sharded": ("attention.q_proj", "attention.out_proj", "intermediate_dense", "output_dense"),
        "refuses": ({"num_attention_heads": 1},),
        "supports": Supports(
            tensor_parallel=(1, 2, 4) if gated else (1, 2, 3, 4),
            sequence=True,
            context=not gated and not (usual or {}).get("use_weighted_layer_sum"),
            captured=("hidden_states",) if gated else ("attentions", "hidden_states"),
            pipeline=pipeline,
            reentrant=not gated,  # transformers' own backward does not end with them
            dropout=not gated,  # drawn there in one dim for rows and heads, of which those of a rank are no part
        ),
        "collectives": (2, 3 if gated else 2),  # gates are made by each head, of gradients that are summed
        **(_conformer(family, **{"pipeline": pipeline, **(usual or {})}) if family in _POSITIONS else {}),
        **fields,
    }
    return Case(name=name, build=partial(build, kind, **usual or {}), inputs=inputs, **settings)


def _conformer(family: str, *, pipeline: bool, position_embeddings_type: str = "", **_: Any) -> dict[str, Any]:
    """Return what differs for a conformer, whose blocks have two MLPs, and convolutions over neighbouring tokens."""
    relative = (position_embeddings_type or _POSITIONS[family]) == "relative"
    return {
        "sharded": ("self_attn.linear_q", "self_attn.linear_out", "intermediate_dense", "output_dense"),
        "whole": ("conv_module",),
        "supports": Supports(
            tensor_parallel=(1, 2, 4) if relative else (1, 2, 3, 4),  # biases of each head are cut in equal parts
            captured=("attentions", "hidden_states"),
            pipeline=pipeline and family == "Wav2Vec2Bert",  # the other normalizes over rows
        ),
        "collectives": (3, 3 if relative else 4),  # all heads read one table of distances
    }


def _family(family: str) -> list[Case]:
    """Return a case for every class of a family."""
    stem = "" if family == "Wav2Vec2" else f"{family.lower()}_"
    conformer = family in _POSITIONS
    stable = {} if family in ("Data2VecAudio", "SEW") or conformer else _STABLE
    projected = ("projected_states", "projected_quantized_states")
    options: dict[str, Any] = {
        "attn_implementation": ("eager",) if family == "WavLM" or (conformer and not _NEW) else ("eager", "sdpa")
    }
    options |= {"stable": (False, True)} if stable else {}
    options |= {"position_embeddings_type": (_POSITIONS[family], "rotary", None)} if conformer and _NEW else {}
    kinds: dict[str, dict[str, Any]] = {
        "CTC": {"options": options},
        "SequenceClassification": {"usual": {**stable, **_WEIGHTED}, "pipeline": False} if family != "SEW" else {},
        "AudioFrameClassification": {"usual": _WEIGHTED, "pipeline": False},
        # transformers asks for the states of all layers: gathered where tokens are split
        "XVector": {
            "usual": stable,
            "outputs": ("logits", "embeddings"),
            **({} if conformer else {"collectives": (3, 3 if family == "WavLM" else 2)}),
        },
        "PreTraining": {
            "usual": stable,
            "outputs": projected[: 1 if family == "UniSpeechSat" else 2],
            "pipeline": False,
        },
    }
    if family not in ("Wav2Vec2", "Wav2Vec2Conformer"):
        kinds["PreTraining"]["loss"] = projected_loss
    names = {"XVector": "xvector", "CTC": "ctc", "PreTraining": "pretraining"}
    names |= {"SequenceClassification": "sequence_classification"}
    names |= {"AudioFrameClassification": "audio_frame_classification"}
    adapter = {"add_adapter": True, "output_hidden_size": 20, "num_adapter_layers": 2}
    features = () if family in ("Hubert", "SEW") else ("extract_features",)
    return [
        *(
            _case(stem + names[head], f"{family}For{head}", **fields)
            for head, fields in kinds.items()
            if hasattr(transformers, f"{family}For{head}")
        ),
        _case(
            f"{stem}model",
            f"{family}Model",
            adapter if family in ("Wav2Vec2", "Data2VecAudio", "Wav2Vec2Conformer") else stable,
            loss=hidden_loss,
            outputs=("last_hidden_state", *features),
            layers="encoder.layers",
        ),
    ]


def cases() -> list[Case]:
    """Return a case for every class, and one with adapters in its layers."""
    adapters = _case("stable_ctc", "Wav2Vec2ForCTC", {**_STABLE, "adapter_attn_dim": 5}, whole=("adapter_layer",))
    relative = _case("wav2vec2bert_relative_ctc", "Wav2Vec2BertForCTC", {"position_embeddings_type": "relative"})
    # Behind its encoder masks are made anew, which needs values that no stage of a pipeline has.
    behind = {"add_adapter": True, "output_hidden_size": 20, "use_intermediate_ffn_before_adapter": True}
    adapted = _case("wav2vec2bert_adapter_ctc", "Wav2Vec2BertForCTC", behind, pipeline=False)
    return [adapters, *(case for family in _FAMILIES for case in _family(family)), relative, adapted]
